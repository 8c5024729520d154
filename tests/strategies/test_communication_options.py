"""CommunicationOptions: their content, merging (§2.10) and effects."""

import gc
import logging

import numpy as np
import pytest

from collectives import Communicator, DeadlineExceededError, OpMismatchError
from collectives.transports.local import alone
from strategies import MultiWorkerMirroredStrategy, Variable, get_replica_context, optimizers
from strategies.communication import with_options
from strategies.core.indexed_slices import IndexedSlices
from strategies.core.options import (
    CollectiveCommunication,
    CommunicationImplementation,
    CommunicationOptions,
)
from strategies.cross_device_ops import RingAllReduce
from tests.strategies.support import Call, mirrored, recorded, refusal, same_refusal

AUTO, RING, NCCL = CommunicationImplementation

in_worlds = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def in_a_world(function):
    for mark in in_worlds:
        function = mark(function)
    return function


# --- the object ----------------------------------------------------------------------------------


def test_defaults():
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is AUTO
    assert CollectiveCommunication is CommunicationImplementation
    assert [each.value for each in CommunicationImplementation] == ["AUTO", "RING", "NCCL"]


@pytest.mark.parametrize("name", ["ring", "RING", "Ring", RING])
def test_implementations_go_by_name_as_well(name):
    assert CommunicationOptions(implementation=name).implementation is RING


def test_what_is_assigned_is_checked_as_what_is_given():
    options = CommunicationOptions()
    options.implementation = "ring"
    assert options.implementation is RING
    text = "CommunicationOptions has no attribute 'bytes_per_packs': it has bytes_per_pack, timeout"
    refusal(AttributeError, text, setattr, options, "bytes_per_packs", 5)
    refusal(ValueError, "bytes_per_pack=-1", setattr, options, "bytes_per_pack", -1)
    assert options == CommunicationOptions(implementation="RING")


def test_equal_options_are_equal():
    made = [CommunicationOptions(np.int64(5), 1, "nccl"), CommunicationOptions(5, 1.0, NCCL)]
    assert made[0] == made[1]
    assert len(set(made)) == 1
    assert made[0] != CommunicationOptions(6, 1.0, NCCL)
    assert repr(made[0]) == (
        "CommunicationOptions(bytes_per_pack=5, timeout_seconds=1.0, implementation=NCCL)"
    )


@pytest.mark.parametrize(
    ("named", "match"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack=-1: must be an integer of at least 0"),
        ({"timeout_seconds": -1}, "timeout_seconds=-1: must be seconds"),
        ({"timeout_seconds": "1"}, "timeout_seconds='1'"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds=nan"),
        ({"timeout_seconds": True}, "timeout_seconds=True"),
        ({"implementation": "GLOO"}, "implementation='GLOO': .* one of AUTO, RING, NCCL"),
        ({"implementation": None}, "implementation=None"),
        ({"implementation": 1}, "implementation=1"),
    ],
)
def test_what_is_refused(named, match):
    refusal(ValueError, match, CommunicationOptions, **named)


@pytest.mark.parametrize("wrong", [1.5, None, True])
def test_bytes_are_whole(wrong):
    match = f"bytes_per_pack={wrong}: must be an integer of at least 0"
    refusal(TypeError, match, CommunicationOptions, wrong)


def test_a_merge_takes_what_is_not_a_default():
    base = CommunicationOptions(100, 5, RING)
    assert base.merge(None) == base
    assert base.merge(CommunicationOptions()) == base
    assert base.merge(CommunicationOptions(7)) == CommunicationOptions(7, 5, RING)
    assert base.merge(CommunicationOptions(timeout_seconds=9)) == CommunicationOptions(100, 9, RING)
    assert base.merge(CommunicationOptions(implementation=NCCL)).implementation is NCCL
    # Zero seconds means no deadline, not the default.
    assert base.merge(CommunicationOptions(0, 0, AUTO)) == CommunicationOptions(100, 0, RING)
    assert CommunicationOptions().merge(base) == base
    assert base == CommunicationOptions(100, 5, RING)


# --- where they arrive ---------------------------------------------------------------------------


def all_reduced(strategy, options=None, op="sum"):
    """The calls of one all_reduce of 3, 3 and 2 numbers, the last ones of another dtype."""
    rank = strategy.communicator.rank

    def replica():
        arrays = [np.full(3, rank + 1.0), np.ones((3, 1)), np.array([rank, 1], np.int32)]
        return get_replica_context().all_reduce(op, arrays, options)

    with recorded() as calls:
        results = strategy.run(replica)
    size = strategy.num_replicas_in_sync
    count = 1 if op == "mean" else size
    assert results[0].tolist() == [(size + 1) / 2 * count] * 3
    assert results[1].tolist() == [[count]] * 3
    assert results[2].tolist() == [(size - 1) / 2 * count, count]
    assert results[2].dtype == (np.float64 if op == "mean" else np.int32)
    return calls


def strategy_with(comm, *options):
    return MultiWorkerMirroredStrategy(None, CommunicationOptions(*options), communicator=comm)


# The elements of the packs, the last array first. A pack is full when it exceeds the limit. The
# mean of integers is float64, so these two are packed with the others.
SUMS = {0: [2, 6], 1: [2, 3, 3], 23: [2, 3, 3], 24: [2, 6], 48: [2, 6]}
MEANS = {0: [8], 1: [2, 3, 3], 15: [2, 3, 3], 16: [5, 3], 39: [5, 3], 40: [8]}


@in_a_world
@pytest.mark.parametrize("implementation", ["ring", "auto"])
def test_packs_have_at_least_so_many_bytes(comm, implementation):
    """As in TensorFlow; with a limit of 0 `collectives` packs, except for the ring."""
    algorithm = "ring" if implementation == "ring" else None
    general = strategy_with(comm)
    for nbytes in sorted({*SUMS, *MEANS}):
        if not nbytes and implementation == "auto":
            continue
        options = CommunicationOptions(nbytes, None, implementation)
        strategy = MultiWorkerMirroredStrategy(None, options, communicator=comm)
        for op, packs in ("sum", SUMS), ("mean", MEANS):
            if nbytes in packs:
                calls = [Call("all_reduce", comm.size, algorithm, each) for each in packs[nbytes]]
                assert all_reduced(strategy, op=op) == calls, nbytes
                assert all_reduced(general, options, op) == calls, nbytes
        strategy.communicator.close()
    general.communicator.close()


@in_a_world
def test_packs_of_tensorflows_own_test(comm):
    """`group_by_size` of 128, 32, 800 and 4 bytes, the gradients' sizes in reverse order."""
    lengths = [4, 800, 32, 128]
    strategy = strategy_with(comm, 200)

    def replica():
        arrays = [np.full(length, comm.rank, np.int8) for length in lengths]
        return get_replica_context().all_reduce("sum", arrays)

    with recorded() as calls:
        totals = strategy.run(replica)
    assert [call.elements for call in calls] == [128 + 32 + 800, 4]
    assert [len(total) for total in totals] == lengths
    assert all((total == sum(range(comm.size))).all() for total in totals)
    strategy.communicator.close()


@in_a_world
@pytest.mark.parametrize("given", [(), (CommunicationOptions(),)])
def test_auto_lets_collectives_choose(comm, given):
    strategy = strategy_with(comm)
    calls = all_reduced(strategy, *given)
    assert calls == [Call("all_reduce_many", comm.size, None, 8)]
    strategy.communicator.close()


@in_a_world
def test_the_ring_gathers_and_reduces_too(comm):
    strategy = strategy_with(comm, 0, None, "RING")
    rows = np.full((comm.rank + 1, 2), comm.rank)
    expected = [rank for rank in range(comm.size) for _ in range(rank + 1)]
    with recorded() as calls:
        assert strategy.gather(rows, axis=0)[:, 0].tolist() == expected
        assert strategy.reduce("sum", 1.0, axis=None) == comm.size
        assert strategy.reduce("mean", rows, axis=0)[0] == pytest.approx(np.mean(expected))
        inside = strategy.run(lambda: get_replica_context().all_gather([rows], axis=0))
        assert inside[0][:, 1].tolist() == expected
    # The third call of all_reduce sums the lengths that the mean is divided by.
    assert [call.algorithm for call in calls] == ["ring", "ring", "ring", None, "ring"]
    assert [call.name for call in calls] == ["all_gather", *["all_reduce"] * 3, "all_gather"]
    strategy.communicator.close()


@in_a_world
def test_a_call_gathers_by_its_own_options(comm):
    strategy = strategy_with(comm)
    options = CommunicationOptions(implementation="RING")

    def replica():
        gather = get_replica_context().all_gather
        return gather(np.array([comm.rank]), 0, options), gather(np.array([comm.rank]), axis=0)

    with recorded() as calls:
        results = strategy.run(replica)
    assert [result.tolist() for result in results] == [list(range(comm.size))] * 2
    assert [call.algorithm for call in calls] == ["ring", None]
    strategy.communicator.close()


@in_a_world
@pytest.mark.parametrize(("seconds", "deadline"), [(12, 12), (0.5, 0.5), (0, None)])
def test_the_timeout_is_the_deadline(comm, seconds, deadline):
    strategy = strategy_with(comm, 0, seconds)
    assert strategy.communicator.deadline == deadline
    assert comm.deadline not in (12, 0.5, None)
    strategy.communicator.close()
    plain = strategy_with(comm)
    assert plain.communicator.deadline == comm.deadline
    plain.communicator.close()


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("implementation", ["AUTO", "RING"])
def test_a_call_waits_no_longer_than_its_timeout(comm, implementation):
    strategy = strategy_with(comm)
    options = CommunicationOptions(0, 0.3, implementation)

    def replica():
        return get_replica_context().all_reduce("sum", np.ones(3), options)

    rows = IndexedSlices([1.0], [0], (2,))
    for call in (
        lambda: strategy.run(replica),
        lambda: strategy.run(lambda: get_replica_context().all_reduce("sum", rows, options)),
        lambda: strategy.extended.reduce_to("sum", np.ones(3), None, options),
        lambda: strategy.extended.reduce_to("sum", rows, None, options),
    ):
        if comm.rank == 0:
            with pytest.raises(DeadlineExceededError, match=r"0\.3 s for rank 1"):
                call()
    comm.barrier()
    assert strategy.communicator.deadline == comm.deadline
    assert strategy.run(replica).tolist() == [2.0] * 3
    strategy.communicator.close()


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_which_options_decide_the_reduction(comm):
    plain = {(): True, (0, 5): True, (9,): False, (0, None, "RING"): False, (9, 5, "NCCL"): False}
    for options, expected in plain.items():
        strategy = strategy_with(comm, *options)
        assert strategy.reduces_plainly is expected
        strategy.communicator.close()
    with mirrored(comm) as without, mirrored(comm, None, RingAllReduce()) as with_ops:
        assert (without.reduces_plainly, with_ops.reduces_plainly) == (True, False)


# --- NCCL ----------------------------------------------------------------------------------------


@in_a_world
def test_nccl_falls_back_to_auto_with_one_warning(comm, caplog):
    with caplog.at_level(logging.INFO, "strategies"):
        strategy = strategy_with(comm, 0, None, "NCCL")
        for _ in range(2):
            assert all_reduced(strategy) == [Call("all_reduce_many", comm.size, None, 8)]
    said = [record.getMessage() for record in caplog.records if "NCCL" in record.getMessage()]
    assert len(said) == (1 if comm.rank == 0 else 0)
    if said:
        assert "all ranks take AUTO" in said[0]
        assert "pip install 'mpi-collectives[cuda12]'" in said[0]
    strategy.communicator.close()


@in_a_world
def test_a_call_that_requests_nccl_falls_back_to_auto(comm, caplog):
    strategy = strategy_with(comm)
    with caplog.at_level(logging.INFO, "strategies"):
        for _ in range(2):
            calls = all_reduced(strategy, CommunicationOptions(implementation="NCCL"))
            assert calls == [Call("all_reduce_many", comm.size, None, 8)]
    assert len(caplog.records) == (1 if comm.rank == 0 else 0)
    strategy.communicator.close()


@in_a_world
def test_one_rank_without_nccl_is_enough(comm, monkeypatch):
    """The other ranks assume that all ranks have NCCL."""
    problem = None if comm.rank == 0 else "no GPU here"
    monkeypatch.setattr(with_options, "nccl_problem", lambda: problem)
    strategy = strategy_with(comm, 0, None, "NCCL")
    assert all_reduced(strategy) == [Call("all_reduce_many", comm.size, None, 8)]
    strategy.communicator.close()


def test_where_all_have_nccl_the_hint_stays(monkeypatch):
    monkeypatch.setattr(with_options, "nccl_problem", lambda: None)
    options = CommunicationOptions(implementation="NCCL")
    assert with_options.agreed_options(Communicator(alone()), options) == options


@in_a_world
def test_auto_warns_once(comm, caplog):
    with caplog.at_level(logging.DEBUG, "strategies"):
        strategy = strategy_with(comm)
        all_reduced(strategy)
    said = [record for record in caplog.records if "AUTO" in record.getMessage()]
    assert len(said) == (1 if comm.rank == 0 else 0)
    strategy.communicator.close()


# --- ranks that differ ---------------------------------------------------------------------------

DIFFERENT = {
    "bytes": lambda rank: CommunicationOptions(100 + min(rank, 1)),
    "timeout": lambda rank: CommunicationOptions(timeout_seconds=[None, 4][min(rank, 1)]),
    "implementation": lambda rank: CommunicationOptions(implementation=["AUTO", "RING"][rank % 2]),
    "NCCL": lambda rank: CommunicationOptions(implementation=["AUTO", "NCCL"][rank % 2]),
    "one without": lambda rank: None if rank == 0 else CommunicationOptions(5),
    "no options": lambda rank: "RING" if rank == 1 else None,
    "no options at all": lambda rank: CommunicationImplementation.RING,
}


@in_a_world
@pytest.mark.parametrize("case", DIFFERENT)
def test_options_that_differ_are_refused_on_every_rank(comm, case):
    given = DIFFERENT[case](comm.rank)
    arguments = (MultiWorkerMirroredStrategy, None, given)
    text = same_refusal(
        comm, ValueError, "must be CommunicationOptions, equal", *arguments, communicator=comm
    )
    for rank in range(comm.size):
        told = DIFFERENT[case](rank)
        told = CommunicationOptions() if told is None else told
        assert f"  rank {rank}: {told!r}" in text
    strategy = strategy_with(comm)
    assert strategy.reduce("sum", 1.0, axis=None) == comm.size
    strategy.communicator.close()


@in_a_world
def test_calls_whose_options_differ_are_refused_on_every_rank(comm):
    strategy = strategy_with(comm)
    options = CommunicationOptions(10 + min(comm.rank, 1), None, "RING")

    def replica():
        return get_replica_context().all_reduce("sum", np.ones(3), options)

    same_refusal(comm, OpMismatchError, "bytes_per_pack=11", strategy.run, replica)
    assert strategy.reduce("sum", 1.0, axis=None) == comm.size
    strategy.communicator.close()


# --- compression ----------------------------------------------------------------------------------


def test_the_compression_is_checked():
    options = CommunicationOptions(compression="topk(0.5)")
    assert repr(options).endswith("implementation=AUTO, compression='topk(0.5)')")
    assert not options.leave_it_to_collectives
    assert CommunicationOptions().merge(options) == options == options.merge(CommunicationOptions())
    for wrong in ("topk", 16):
        with pytest.raises(ValueError, match="compression="):
            options.compression = wrong


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_gradients_are_compressed_between_nodes(comm):
    """Those of an optimizer's step; metrics and reductions of values stay exact."""
    from mpi4py import MPI

    with Communicator(MPI.COMM_WORLD, deadline=60, node_of=[0, 1, 1]) as spread:
        options = CommunicationOptions(compression="topk(0.25)")
        strategy = MultiWorkerMirroredStrategy(None, options, communicator=spread)
        with strategy.scope():
            first, second = Variable(np.zeros(8)), Variable(np.zeros((2, 2)))
            optimizer = optimizers.SGD(1.0)
        gradient = np.arange(8.0) ** 2 * (1 + comm.rank)

        def step(variables):
            pairs = [
                (gradient[: each.numpy().size].reshape(each.shape), each) for each in variables
            ]
            optimizer.apply_gradients(pairs)
            return get_replica_context().all_reduce("sum", gradient)

        exact = strategy.run(step, ([first, second],))
        np.testing.assert_array_equal(exact, np.arange(8.0) ** 2 * 6)
        # 2 of 8 and 1 of 4 are the largest, on both nodes.
        np.testing.assert_array_equal(first, [0, 0, 0, 0, 0, 0, -36 * 6, -49 * 6])
        np.testing.assert_array_equal(second, [[0, 0], [0, -9 * 6]])
        # Another list of variables begins anew; this one goes on with what it has left out.
        strategy.run(step, ([second],))
        np.testing.assert_array_equal(second, [[0, 0], [0, -9 * 12]])
        for _ in range(3):
            strategy.run(step, ([first, second],))
        assert np.count_nonzero(first) > 2
        # What was left out is released with the variables.
        known = strategy._collectives.compressed._lists
        assert len(known) == 2
        del first
        gc.collect()
        assert list(known) == [f"variables ({second.number},)"]


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_ranks_with_other_compressions_are_refused(comm):
    options = CommunicationOptions(compression=("float16", None)[comm.rank])
    with pytest.raises(ValueError, match="compression='float16'"):
        MultiWorkerMirroredStrategy(None, options, communicator=comm)
