"""The cross-device ops of the package: numbers, paths, packs and refusals."""

import numpy as np
import pytest

import collectives
from collectives import (
    BackendUnavailableError,
    OpMismatchError,
    RootMismatchError,
    ShapeMismatchError,
)
from strategies import Strategy, Variable, VariableAggregation, get_replica_context, optimizers
from strategies.cross_device_ops import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from strategies.cross_device_ops import ops as ways
from tests.strategies.support import (
    Call,
    arrays_of,
    mirrored,
    recorded,
    refusal,
    same_refusal,
)

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]


def added(arrays):
    return np.add.reduce(arrays)


WAYS = {
    "default": lambda: None,
    "ring": RingAllReduce,
    "ring, 3 packs": lambda: RingAllReduce(3),
    "ring, no packs": lambda: RingAllReduce(0),
    "hierarchical": HierarchicalCopyAllReduce,
    "hierarchical, 2 packs": lambda: HierarchicalCopyAllReduce(num_packs=2),
    "one device": ReductionToOneDevice,
    "the second device": lambda: ReductionToOneDevice("CPU:1"),
    "accumulated": lambda: ReductionToOneDevice(accumulation_fn=added),
}
every_way = pytest.mark.parametrize("way", WAYS)


def check(result, *given, mean=False):
    """Compare a result with the expected one on all ranks."""
    wide = np.stack([np.asarray(each, np.complex128).real for each in given])
    dtype = np.asarray(given[0]).dtype
    if dtype.kind == "b" and not mean:
        expected = wide.any(axis=0)
    else:
        expected = wide.mean(axis=0) if mean else wide.sum(axis=0)
    wanted = np.float64 if mean and dtype.kind in "biu" else dtype
    assert (np.shape(result), np.asarray(result).dtype) == (np.shape(given[0]), wanted)
    np.testing.assert_allclose(
        np.asarray(result, np.float64), expected, rtol=2e-3 if dtype == np.float16 else 1e-6
    )


def all_reduced(op, value):
    return get_replica_context().all_reduce(op, value)


def assert_usable(strategy):
    size, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    assert strategy.reduce("sum", float(rank), axis=None) == size * (size - 1) / 2


# --- numbers -------------------------------------------------------------------------------------


@every_way
def test_every_way_gives_the_same_numbers(comm, way):
    given = [arrays_of(rank) for rank in range(comm.size)]
    results = []
    with mirrored(comm, None, WAYS[way]()) as strategy:
        for op in ("sum", "MEAN"):
            results.append((op, strategy.reduce(op, given[comm.rank], axis=None)))
            inside = strategy.run(all_reduced, (op, given[comm.rank]))
            results.append((op, inside))
    for op, result in results:
        assert list(result) == list(given[0])
        for name in result:
            parts = [each[name] for each in given]
            if isinstance(parts[0], list):
                for place, each in enumerate(result[name]):
                    check(each, *(part[place] for part in parts), mean=op == "MEAN")
            else:
                check(result[name], *parts, mean=op == "MEAN")


@every_way
def test_every_way_trains_the_same_model(comm, way):
    with mirrored(comm, None, WAYS[way]()) as strategy:
        with strategy.scope():
            weights, bias = Variable(np.ones((2, 3))), Variable(np.zeros(3, np.float32))
        optimizer = optimizers.SGD(0.5)

        def step():
            gradients = [np.full((2, 3), comm.rank + 1.0), np.arange(3, dtype=np.float32)]
            optimizer.apply_gradients(zip(gradients, [weights, bias], strict=True))
            return gradients

        gradients = strategy.run(step)
    total = comm.size * (comm.size + 1) / 2
    np.testing.assert_array_equal(weights.numpy(), np.full((2, 3), 1 - 0.5 * total))
    np.testing.assert_array_equal(bias.numpy(), -0.5 * comm.size * np.arange(3))
    assert gradients[1].tolist() == [0, 1, 2]


@every_way
def test_reductions_over_an_axis_and_of_variables_go_the_same_way(comm, way):
    with mirrored(comm, None, WAYS[way]()) as strategy:
        value = np.arange(2.0 + comm.rank)
        everything = np.concatenate([np.arange(2.0 + rank) for rank in range(comm.size)])
        assert strategy.reduce("mean", value, axis=0) == pytest.approx(everything.mean())
        with strategy.scope():
            counter = Variable(0.0, aggregation=VariableAggregation.SUM)
        strategy.run(lambda: counter.assign_add(comm.rank + 1.0))
        assert float(counter) == comm.size * (comm.size + 1) / 2


@every_way
def test_what_is_gathered_does_not_depend_on_the_way(comm, way):
    with mirrored(comm, None, WAYS[way]()) as strategy:
        rows = strategy.gather(np.full((comm.rank + 1, 2), comm.rank), axis=0)
    assert rows[:, 1].tolist() == [rank for rank in range(comm.size) for _ in range(rank + 1)]


# --- paths ---------------------------------------------------------------------------------------


def calls_of(comm, ops, *arrays):
    """This rank's calls for arrays reduced in replica context, after a first reduction."""
    with mirrored(comm, None, ops) as strategy:

        def reduce():
            return get_replica_context().all_reduce("sum", list(arrays))

        strategy.run(reduce)  # groups are created in the first call
        with recorded() as calls:
            strategy.run(reduce)
    return calls


def test_without_ops_collectives_fuse_and_choose(comm):
    calls = calls_of(comm, None, np.ones(5), np.ones(3))
    assert calls == [Call("all_reduce_many", comm.size, None, 8)]


def test_the_ring_is_forced(comm):
    calls = calls_of(comm, RingAllReduce(), np.ones(5), np.ones(3))
    assert calls == [Call("all_reduce", comm.size, "ring", 8)]


@pytest.mark.parametrize(("device", "root"), [(None, 0), ("/gpu:0", 0), ("CPU:1", 1), (1, 1)])
def test_one_device_reduces_and_sends_the_result(comm, device, root):
    calls = calls_of(comm, ReductionToOneDevice(device), np.ones(5), np.ones(3))
    assert calls == [
        Call("reduce", comm.size, None, 8, root),
        Call("broadcast", comm.size, None, 8, root),
    ]


def test_an_accumulation_function_gets_every_replicas_array_on_one_rank(comm):
    seen = []

    def largest(arrays):
        seen.append([array.tolist() for array in arrays])
        return np.max(arrays, axis=0)

    array = np.array([[comm.rank, -comm.rank], [1, 2]])
    with mirrored(comm, None, ReductionToOneDevice(1, largest)) as strategy, recorded() as calls:
        result = strategy.reduce("sum", array, axis=None)
        mean = strategy.reduce("mean", array, axis=None)
    assert result.tolist() == [[comm.size - 1, 0], [1, 2]]
    assert mean.tolist() == (result / comm.size).tolist()
    assert [call.name for call in calls] == ["gather", "broadcast"] * 2
    expected = [[[rank, -rank], [1, 2]] for rank in range(comm.size)]
    assert seen == ([expected] * 2 if comm.rank == 1 else [])


def expected_hierarchy(own, size, leads, leaders):
    """The calls of one rank: to its leader, among leaders, from its leader."""
    among = [Call("all_reduce", leaders, None, size)] if leads else []
    return [Call("reduce", own, None, size), *among, Call("broadcast", own, None, size)]


def test_pairs_stand_for_nodes_where_there_is_one(comm):
    calls = calls_of(comm, HierarchicalCopyAllReduce(), np.ones(5), np.ones(3))
    own = 1 if comm.size % 2 and comm.rank == comm.size - 1 else 2
    leads = comm.rank % 2 == 0
    assert calls == expected_hierarchy(own, 8, leads, (comm.size + 1) // 2)


@pytest.mark.ranks(3, 4)
def test_nodes_reduce_to_their_leaders(comm):
    """One strategy over all nodes, which MirroredStrategy refuses."""
    from mpi4py import MPI

    node_of = [0] + [1] * (comm.size - 1)
    spread = collectives.Communicator(MPI.COMM_WORLD, node_of=node_of, deadline=30)
    strategy = Strategy(spread, cross_device_ops=HierarchicalCopyAllReduce())
    assert_usable(strategy)
    with recorded() as calls:
        total = strategy.reduce("sum", np.full(6, comm.rank + 1.0), axis=None)
    own = node_of.count(node_of[comm.rank])
    assert calls == expected_hierarchy(own, 6, comm.rank in (0, 1), 2)
    assert total.tolist() == [comm.size * (comm.size + 1) / 2] * 6
    spread.close()


# --- packs ---------------------------------------------------------------------------------------


def packs_of(comm, num_packs, *arrays):
    """The elements of each pack, as they are before the reduction."""
    seen = []

    class Recording(RingAllReduce):
        def all_reduce_pack(self, pack, op):
            seen.append((pack.dtype.name, pack.ravel().tolist()))
            super().all_reduce_pack(pack, op)

    with mirrored(comm, None, Recording(num_packs)) as strategy:
        results = strategy.run(lambda: get_replica_context().all_reduce("sum", list(arrays)))
    for result, array in zip(results, arrays, strict=True):
        np.testing.assert_array_equal(result, array * comm.size)
    return seen


@pytest.mark.parametrize(
    ("num_packs", "lengths"),
    [(0, [3, 7]), (1, [10]), (2, [5, 5]), (3, [3, 3, 4]), (4, [2, 2, 2, 4]), (11, [10])],
)
def test_packs_are_equal_and_the_last_has_the_remainder(comm, num_packs, lengths):
    packs = packs_of(comm, num_packs, np.arange(7.0), np.array([[10.0], [20.0], [30.0]]))
    assert [len(elements) for _, elements in packs] == lengths
    # The last array is packed first.
    joined = [element for _, elements in packs for element in elements]
    assert joined == [10, 20, 30, 0, 1, 2, 3, 4, 5, 6]


def test_a_pack_has_one_dtype(comm):
    half = np.arange(3, dtype=np.float16)
    packs = packs_of(comm, 2, np.arange(4), half, np.arange(10, 12), half + 5)
    assert packs == [
        ("float16", [5, 6, 7]),
        ("float16", [0, 1, 2]),
        ("int64", [10, 11, 0]),
        ("int64", [1, 2, 3]),
    ]


def test_empty_arrays_make_no_pack(comm):
    assert packs_of(comm, 0, np.zeros((0, 3)), np.ones(1)) == [("float64", [1])]


# --- NCCL ----------------------------------------------------------------------------------------


def test_nccls_error_names_what_is_missing(comm):
    text = same_refusal(comm, BackendUnavailableError, "pip install 'mpi-coll", NcclAllReduce, 2)
    assert "RingAllReduce" in text


def test_nccl_that_another_rank_lacks_is_refused_on_all(comm, monkeypatch):
    """`tests/devices` tests the case where all ranks have it."""
    monkeypatch.setattr(ways, "nccl_problem", lambda: None)
    with mirrored(comm, None, NcclAllReduce(2)) as strategy:
        arguments = (strategy.reduce, "sum", np.ones(3), None)
        same_refusal(comm, BackendUnavailableError, "NcclAllReduce: rank 0: ", *arguments)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", True, None])
def test_packs_are_counted(wrong):
    for kind in (RingAllReduce, NcclAllReduce, HierarchicalCopyAllReduce):
        error = ValueError if wrong == -1 else TypeError
        refusal(error, "num_packs=.*: must be an integer", kind, wrong)


@pytest.mark.parametrize("wrong", ["CPU", "cpu0", "/job:worker", "TPU:0", 1.5, ["CPU:0"]])
def test_devices_have_names(wrong):
    refusal(ValueError, "device .*: must be a name such as", ReductionToOneDevice, wrong)


@pytest.mark.parametrize("device", ["CPU:9", -1, 9])
def test_a_device_that_is_not_there(comm, device):
    with mirrored(comm, None, ReductionToOneDevice(device)) as strategy:
        reduce = strategy.reduce
        same_refusal(comm, ValueError, f"there are {comm.size} ranks", reduce, "sum", 1.0, None)


@pytest.mark.parametrize("wrong", ["raises", "another shape", "no array"])
def test_an_accumulation_function_that_fails_is_refused_everywhere(comm, wrong):
    def accumulate(arrays):
        if wrong == "raises":
            raise KeyError("inside")
        return np.ones(7) if wrong == "another shape" else "text"

    match = {"raises": "KeyError: 'inside'", "another shape": r"\(7,\).*\(3,\)"}.get(wrong, "shape")
    with mirrored(comm, None, ReductionToOneDevice(1, accumulate)) as strategy:
        text = same_refusal(comm, ValueError, match, strategy.reduce, "sum", np.ones(3), None)
        assert "failed on rank 1" in text
        strategy._cross_device_ops.accumulation_fn = added
        assert_usable(strategy)


@every_way
def test_shapes_of_equal_length_are_distinguished(comm, way):
    shape = (2, 3) if comm.rank else (3, 2)
    with mirrored(comm, None, WAYS[way]()) as strategy:

        def replica():
            return get_replica_context().all_reduce("sum", np.ones(shape))

        same_refusal(comm, ShapeMismatchError, r"[(\[]2, 3[)\]]", strategy.run, replica)
        assert_usable(strategy)


@every_way
def test_different_ops_are_distinguished(comm, way):
    op = "sum" if comm.rank else "mean"
    with mirrored(comm, None, WAYS[way]()) as strategy:

        def replica():
            return get_replica_context().all_reduce(op, np.ones(3))

        same_refusal(comm, OpMismatchError, "(?i)mean", strategy.run, replica)
        assert_usable(strategy)


def test_roots_that_differ_are_refused(comm):

    ops = ReductionToOneDevice(min(comm.rank, 1))
    strategy = Strategy(comm, cross_device_ops=ops)
    errors = (OpMismatchError, RootMismatchError)
    with pytest.raises(errors, match="ReductionToOneDevice"):
        strategy.run(lambda: get_replica_context().all_reduce("sum", np.ones(3)))
    ops.root = 0
    assert_usable(strategy)
