"""Collectives between imitated nodes: few bytes travel with the check of the call, more don't."""

import pickle
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

from collectives import (
    CollectiveError,
    Communicator,
    DeadlineExceededError,
    OpMismatchError,
    ShapeMismatchError,
)
from collectives.bound import all_to_all, between_nodes
from collectives.bound.between_nodes import (
    LARGEST_ALONE,
    STAGED_BYTES_OF_ALL,
    staged_reduction,
)
from collectives.bound.exchanged_rows import room_of_row
from collectives.consistency.dissemination import LARGEST_EXCHANGE
from collectives.execution.cost_model import CostParameters, Layout, built_in
from collectives.execution.host_memory import HostMemory
from collectives.lifecycle import nodes
from collectives.reductions.reduction import BFLOAT16, ReduceOp
from collectives.schedules.paths import HIERARCHICAL, NATIVE
from collectives.shm.layout import SMALL_BYTES, STAGE_BYTES
from collectives.shm.online_tuning import PathTimes
from collectives.transports.mpi import MpiTransport
from collectives.transports.mpi_neighbors import MpiNeighborChannel
from tests.collectives.oracle import case, reduced, value, values
from tests.collectives.waiting import wait_for_all

pytestmark = pytest.mark.mpi

LAYOUTS = {
    "each alone": lambda rank, size: rank,
    "every second": lambda rank, size: rank % 2,
    "one apart": lambda rank, size: int(rank == size - 1),
}
FEW, MANY = 2, 100_000


@pytest.fixture(params=LAYOUTS)
def part(comm, request):
    node_of = [LAYOUTS[request.param](rank, comm.size) for rank in range(comm.size)]
    with Communicator(MPI.COMM_WORLD, node_of=node_of, deadline=20) as part:
        yield part


def path_of_last(comm):
    """The path of the last call, as the flight recorder has it."""
    return comm._engine.recorder.entries()[-1][2]


def check(comm, collective, rows, call, expected):
    """Twice, as the second call is found again; and the path is that of few or many bytes."""
    for _ in range(2):
        with case(collective, rows):
            result = call()
            if expected is None:
                assert result is None
            else:
                np.testing.assert_array_equal(result, expected)
                assert result.dtype == expected.dtype
            few = path_of_last(comm) == "dissemination"
            assert few == (rows == FEW), path_of_last(comm)


@pytest.mark.ranks(2, 3, 4)
def test_arrays_and_outputs_of_every_form(part):
    rank, size = part.rank, part.size
    array = np.arange(12.0).reshape(3, 4) + 100 * rank
    total = size * np.arange(12.0).reshape(3, 4) + 50 * size * (size - 1)
    # Twice: the second call is bound, and the data lie in other slots.
    for _ in range(2):
        np.testing.assert_array_equal(part.all_reduce(array), total)
        assert path_of_last(part) == "dissemination"
        np.testing.assert_array_equal(part.all_reduce(array, "mean"), total / size)
        out = np.empty_like(array)
        assert part.all_reduce(array[::-1], out=out) is out
        np.testing.assert_array_equal(out, total[::-1])
        # The input and the output overlap.
        memory = np.zeros(7)
        memory[:4] = array[0]
        part.all_reduce(memory[:4], out=memory[3:])
        np.testing.assert_array_equal(memory[3:], total[0])
        place = array.copy()
        assert part.all_reduce(place, out=place) is place
        np.testing.assert_array_equal(place, total)
        transposed = np.empty((4, 3)).T
        assert part.all_reduce(array, out=transposed) is transposed
        np.testing.assert_array_equal(transposed, total)
        halves = part.all_reduce(array.astype(np.float16))
        assert halves.dtype == np.float16
        np.testing.assert_array_equal(halves, total)
        single = part.all_reduce(np.asarray(rank))
        assert (single, single.shape) == (size * (size - 1) // 2, ())


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_reductions(part, rows):
    rank, size = part.rank, part.size
    array, every = value(rank, (rows * size, 3)), values(size, (rows * size, 3))
    total, root = reduced("sum", every), size - 1
    check(
        part, "reduce", rows, lambda: part.reduce(array, root=root), total if rank == root else None
    )
    out = np.empty_like(total)
    check(
        part,
        "reduce",
        rows,
        lambda: part.reduce(array, "mean", out=out),
        total / size if rank == 0 else None,
    )
    block = slice(rank * rows, (rank + 1) * rows)
    check(
        part,
        "reduce_scatter",
        rows,
        lambda: part.reduce_scatter(array, "max"),
        reduced("max", every)[block],
    )
    check(
        part,
        "reduce_scatter",
        rows,
        lambda: part.reduce_scatter(array, "mean"),
        (total / size)[block],
    )
    check(part, "scan", rows, lambda: part.scan(array), reduced("sum", every[: rank + 1]))
    below = reduced("sum", every[:rank]) if rank else np.zeros_like(array)
    check(part, "exscan", rows, lambda: part.exscan(array), below)
    kept = array.copy()
    check(
        part,
        "scan in place",
        rows,
        lambda: part.scan(kept, "min", out=kept),
        reduced("min", every[: rank + 1]),
    )
    assert (array == value(rank, (rows * size, 3))).all()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_movements(part, rows):
    rank, size = part.rank, part.size
    every = [value(each, (rows + each, 3), np.float32, 100) for each in range(size)]
    joined = np.concatenate(every)
    check(part, "all_gather", rows, lambda: part.all_gather(every[rank]), joined)
    out = np.empty_like(joined)
    check(part, "all_gather into out", rows, lambda: part.all_gather(every[rank], out=out), joined)
    check(
        part,
        "gather",
        rows,
        lambda: part.gather(every[rank], root=1),
        joined if rank == 1 else None,
    )
    mixed = [value(each, (3, rows), np.int64, 100) for each in range(size)]
    check(
        part,
        "axis",
        rows,
        lambda: part.all_gather(mixed[rank], axis=1),
        np.concatenate(mixed, axis=1),
    )
    for root in (0, size - 1):
        content = value(root, (rows, 5), np.complex128)
        check(
            part,
            "broadcast",
            rows,
            lambda root=root: part.broadcast(value(rank, (rows, 5), np.complex128), root=root),
            content,
        )
    whole = [value(each, (rows * size, 2), np.int16) for each in range(size)]
    received = np.concatenate([each[rank * rows : (rank + 1) * rows] for each in whole])
    check(part, "all_to_all", rows, lambda: part.all_to_all(whole[rank]), received)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("on_one_node", [False, True])
def test_what_the_root_alone_knows(comm, part, on_one_node):
    """Blocks of arrays and objects of all lengths: around what travels, and more."""
    part = comm if on_one_node else part
    rank, size = part.rank, part.size
    root, kept = size - 1, []
    for rows in (0, 1, 2 * size, 2 * size + 1, 2728, 2730, MANY):
        whole = value(root, (3, rows, 2), np.int32, 100)
        block = np.array_split(whole, size, axis=1)[rank]
        for _ in range(2):
            with case("rows", rows):
                result = part.scatter(whole if rank == root else None, root=root, axis=1)
                np.testing.assert_array_equal(result, block)
                assert result.flags.carray
                assert result.dtype == np.int32
                kept.append((result, block))
    for length in (0, 10, 30_000, 65_000, 65_500, 200_000):
        sent = {"root": root, "content": bytes(range(250)) * (length // 250)}
        assert part.broadcast_object(sent if rank == root else None, root) == sent
    for result, block in kept:  # later calls have used the same memory
        np.testing.assert_array_equal(result, block)
    for wrong, axis in ((np.array([{}]), 0), (np.ones(2), 3)):
        with pytest.raises((TypeError, ValueError)):
            part.scatter(wrong if rank == 0 else None, axis=axis)
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            part.broadcast_object(lambda: 0)
    assert part.broadcast_object(rank, 0) == 0


@pytest.mark.ranks(2, 3)
def test_what_ranks_choose_for_themselves(part):
    """Few bytes on one rank and many on another; parts of different kinds; empty rows."""
    rank, size = part.rank, part.size
    lengths = [[3, 0, 1], [3, MANY, 1], [0, 0, 0], [MANY, 0, MANY]]
    for counts in [*lengths, *lengths]:
        every = [value(each, (counts[each], 2), np.int32, 100) for each in range(size)]
        np.testing.assert_array_equal(part.all_gather(every[rank]), np.concatenate(every))
        joined = part.gather(every[rank])
        assert (joined is None) == (rank > 0)
        if rank == 0:
            np.testing.assert_array_equal(joined, np.concatenate(every))
        parts = [np.full(counts[peer] + 1, 10 * rank + peer) for peer in range(size)]
        for peer, received in enumerate(part.all_to_all(parts)):
            np.testing.assert_array_equal(received, np.full(counts[rank] + 1, 10 * peer + rank))
    # One rank sends parts of another shape than the others.
    alike = np.full((size, 2 + (rank == 0)), rank)
    received = part.all_to_all([*alike])
    assert [each.tolist() for each in received] == [
        [peer] * (2 + (peer == 0)) for peer in range(size)
    ]


@pytest.mark.ranks(2, 3)
def test_parts_of_more_bytes_than_mpi_counts(part, monkeypatch):
    monkeypatch.setattr(all_to_all, "LARGEST_NATIVE", 0)
    every = [value(each, (part.size, MANY), np.float64) for each in range(part.size)]
    received = part.all_to_all(every[part.rank])
    assert path_of_last(part) == "pairwise"
    np.testing.assert_array_equal(received, [each[part.rank] for each in every])


@pytest.mark.ranks(2, 3)
def test_sizes_around_the_most_that_travels(part):
    most, size, rank = room_of_row(part._engine, part.size), part.size, part.rank
    for nbytes in (most - 1, most, most + 1):
        every = [np.arange(nbytes, dtype=np.uint8) * (each + 1) for each in range(size)]
        np.testing.assert_array_equal(part.all_gather(every[rank]), np.concatenate(every))
        assert (path_of_last(part) == "dissemination") == (nbytes <= most)
    most = room_of_row(part._engine, 1)
    for nbytes in (most - 1, most, most + 1):
        content = np.arange(nbytes, dtype=np.uint8) * (rank + 3)
        expected = np.arange(nbytes, dtype=np.uint8) * (size + 2)
        np.testing.assert_array_equal(part.broadcast(content, root=size - 1), expected)
        assert (path_of_last(part) == "dissemination") == (nbytes <= most)


@pytest.mark.ranks(2, 3)
def test_reductions_around_the_most_that_travels(part):
    """An array of each of two ranks alone needs no slot, unless only one gets the result."""
    engine, rank, size = part._engine, part.rank, part.size
    engine.layout = replace(engine.layout, oversubscription=1.0)
    engine.use(replace(engine.costs, schedule_bandwidth=1e12), "a link without limits")
    usual = min(SMALL_BYTES, LARGEST_EXCHANGE // len(engine.layout.local_sizes) // 8 * 8)
    most = LARGEST_ALONE if size == 2 else usual
    for nbytes in (usual, usual + 8, most, most + 8):
        every = values(size, nbytes // 8)
        with case(nbytes):
            for out in (None, np.empty_like(every[0])):
                result = part.all_reduce(every[rank], "mean", out=out)
                np.testing.assert_array_equal(result, reduced("mean", every))
                assert (path_of_last(part) == "dissemination") == (nbytes <= most)
            result = part.reduce(every[rank], "max")
            if rank == 0:
                np.testing.assert_array_equal(result, reduced("max", every))
            assert (path_of_last(part) == "dissemination") == (nbytes <= usual)


@pytest.fixture
def oversubscribed(monkeypatch):
    """Communicators made from here on take their ranks to share cores."""
    layout = nodes._layout

    def on_fewer_cores(engine, where):
        return replace(layout(engine, where), oversubscription=2.0)

    monkeypatch.setattr(nodes, "_layout", on_fewer_cores)


@pytest.fixture(params=["every second", "one apart"])
def two_nodes(comm, oversubscribed, request):
    node_of = [LAYOUTS[request.param](rank, comm.size) for rank in range(comm.size)]
    with Communicator(MPI.COMM_WORLD, node_of=node_of, deadline=20) as part:
        yield part


@pytest.mark.ranks(3, 4)
def test_leaders_of_two_oversubscribed_nodes_exchange_what_is_staged(two_nodes, monkeypatch):
    """Also between calls of other sizes, which use the same memory in other steps."""
    rank, size, engine = two_nodes.rank, two_nodes.size, two_nodes._engine
    assert {each.layout.oversubscription for each in (engine, engine.node.across or engine)} == {2}
    folded = max(engine.layout.local_sizes) * 200_000
    for of_all, most in ((STAGED_BYTES_OF_ALL, STAGE_BYTES), (folded, 200_000)):
        monkeypatch.setattr(between_nodes, "STAGED_BYTES_OF_ALL", of_all)
        two_nodes._forget_bound()
        for nbytes in (8, SMALL_BYTES + 8, most, most + 8, 3 * STAGE_BYTES):
            every = values(size, nbytes // 8)
            for op in ("sum", "mean", "max"):
                with case(nbytes, op):
                    expected, array = reduced(op, every), every[rank].copy()
                    np.testing.assert_array_equal(two_nodes.all_reduce(array, op), expected)
                    travels = path_of_last(two_nodes) == "dissemination"
                    assert travels == (nbytes <= most)
                    explained = two_nodes.explain("all_reduce", nbytes, array.dtype)
                    assert explained.startswith("dissemination runs") == travels
                    assert ("share cores" in explained) == (SMALL_BYTES < nbytes <= most)
                    assert two_nodes.all_reduce(array, op, out=array) is array
                    np.testing.assert_array_equal(array, expected)
    rows = value(rank, 20_000)
    np.testing.assert_array_equal(two_nodes.all_reduce(rows[::-1]), sum(values(size, 20_000))[::-1])
    halves = two_nodes.all_reduce(np.full(50_000, rank, np.float16))
    np.testing.assert_array_equal(halves, np.full(50_000, sum(range(size))))


@pytest.mark.ranks(3, 4)
def test_two_oversubscribed_nodes_without_room_for_stages(comm, oversubscribed, monkeypatch):
    monkeypatch.setattr("collectives.transports.mpi.has_room", lambda nbytes: False)
    node_of = [rank % 2 for rank in range(comm.size)]
    with Communicator(MPI.COMM_WORLD, node_of=node_of, deadline=20) as part:
        every = values(part.size, 50_000)
        np.testing.assert_array_equal(part.all_reduce(every[part.rank]), sum(every))
        assert path_of_last(part) != "dissemination"


@pytest.mark.parametrize(
    ("local_sizes", "oversubscription", "bandwidth", "travels"),
    [
        ((2, 2), 2, 1.25e9, True),
        ((4, 4), 4, 1.25e9, True),
        ((2, 1), 1.5, 1.25e9, True),
        ((9, 9), 1.125, 1.25e9, False),
        ((9, 9), 1.125, 1e12, False),
    ],
)
@pytest.mark.ranks(2)
def test_leaders_fold_where_few_cores_wait(
    comm, local_sizes, oversubscription, bandwidth, travels, monkeypatch
):
    """By built-in parameters but for the link's, 900 KiB."""
    with Communicator(MPI.COMM_WORLD, node_of=range(2), deadline=20) as part:
        engine = part._engine
        engine.layout = Layout(local_sizes, oversubscription)
        costs = replace(built_in(engine.layout), schedule_bandwidth=bandwidth)
        engine.use(costs, "figures of this test")
        paths = dict.fromkeys([NATIVE, HIERARCHICAL])
        with monkeypatch.context() as patched:
            patched.setattr(engine, "paths", lambda *given: paths)
            found = staged_reduction(engine, ReduceOp.SUM, np.dtype(float), 900 << 10)
        assert (found is not None) == travels


@pytest.mark.ranks(3, 4)
def test_staged_data_of_a_call_that_was_withdrawn_or_refused(two_nodes):
    rank, size, length = two_nodes.rank, two_nodes.size, 50_000
    for turn in range(3):
        expected = np.full(length, sum(range(size)) + size * turn)
        with pytest.raises(OpMismatchError):
            two_nodes.all_reduce(np.ones(length), "sum" if rank else "max")
        with pytest.raises(ShapeMismatchError):
            two_nodes.all_reduce(np.ones(length if rank == size - 1 else 3))
        np.testing.assert_array_equal(two_nodes.all_reduce(np.full(length, rank + turn)), expected)
        two_nodes.deadline = 0.3
        if rank != turn:
            with pytest.raises(DeadlineExceededError) as caught:
                two_nodes.all_reduce(np.full(length, -1))
            assert turn in caught.value.absent
        wait_for_all()
        two_nodes.deadline = 20
        np.testing.assert_array_equal(two_nodes.all_reduce(np.full(length, rank + turn)), expected)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("bandwidth", [1e7, 1e10])
def test_reductions_travel_with_the_check_where_the_link_is_fast(comm, bandwidth):
    """Every node would receive the arrays of all others."""
    array, every = value(comm.rank, (256, 4)), values(comm.size, (256, 4))
    with Communicator(MPI.COMM_WORLD, node_of=range(comm.size), deadline=20) as part:
        costs = replace(part._engine.costs, schedule_bandwidth=bandwidth)
        part._engine.use(costs, "figures of this test")
        travels = bandwidth > 1e9
        for collective in ("all_reduce", "reduce"):
            explained = part.explain(collective, array.nbytes, array.dtype)
            assert explained.startswith("dissemination runs") == travels, explained
        np.testing.assert_array_equal(part.all_reduce(array), sum(every))
        assert (path_of_last(part) == "dissemination") == travels
        # So small that nothing is gained.
        np.testing.assert_array_equal(part.all_reduce(array[0]), sum(each[0] for each in every))
        assert path_of_last(part) == "dissemination"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_what_is_explained_runs(part, rows):
    array = np.full(rows * part.size, part.rank + 1.0)
    for collective, call in {
        "reduce": part.reduce,
        "scan": part.scan,
        "exscan": part.exscan,
        "broadcast": part.broadcast,
        "scatter": lambda array: part.scatter(array if part.rank == 0 else None),
    }.items():
        with case(collective):
            call(array)
            explained = part.explain(collective, array.nbytes, array.dtype)
            assert explained.split()[0] == path_of_last(part), explained
    # Parts of one size go by MPI's own call, whatever a message of a schedule takes.
    part._engine.use(replace(part._engine.costs, native_latency=1.0), "parameters of a test")
    part.all_to_all(array)
    explained = part.explain("all_to_all", array.nbytes, array.dtype)
    assert explained.split()[0] == path_of_last(part), explained


@pytest.mark.ranks(2, 3)
def test_a_barrier_moves_no_data(part):
    for _ in range(3):
        part.barrier()
        assert path_of_last(part) == ""


@pytest.mark.ranks(2, 3)
def test_a_wrong_room_and_a_mismatch_leave_the_ranks_in_step(part):
    rank, size = part.rank, part.size
    for deadline, of_others in ((20, 20), (19, 20), (18, 18)):
        out = np.empty((2 * size + (rank == 0), 2))
        with pytest.raises(ValueError, match=f"out has {2 * size + 1} rows on rank 0"):
            part.all_gather(value(rank, (2, 2)), out=out)
        # With a shorter deadline than in the call before a node votes; others have sent much then.
        part.deadline = of_others if rank else deadline
        with pytest.raises(OpMismatchError):
            part.all_reduce(np.ones(5000), "sum" if rank else "max")
        np.testing.assert_array_equal(
            part.scan(value(rank, 3)), reduced("sum", values(rank + 1, 3))
        )


@pytest.mark.ranks(2, 3)
def test_ranks_may_have_different_deadlines(part):
    rank, size = part.rank, part.size
    part.deadline = 20 if rank else None
    for turn in range(3):
        handle = part.all_reduce_async(np.full(FEW, rank + turn))
        assert handle.wait()[0] == sum(range(size)) + size * turn
    part.deadline = 20 if rank else 2
    part.barrier()
    if rank == 0:
        time.sleep(0.4)
    part.barrier()
    # By the deadline of rank 0 the other ranks have begun the last call too long ago.
    expected = reduced("sum", values(rank + 1, MANY))
    np.testing.assert_array_equal(part.scan(value(rank, MANY)), expected)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("nodes", LAYOUTS)
def test_every_channel_is_closed(comm, nodes, monkeypatch):
    """Also that of the asynchronous calls before they have shared memory."""
    opened, ranks = [], range(comm.size)

    class Recorded(MpiNeighborChannel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            opened.append(self)

    monkeypatch.setattr("collectives.transports.mpi.MpiNeighborChannel", Recorded)
    node_of = [LAYOUTS[nodes](rank, comm.size) for rank in ranks]
    with Communicator(MPI.COMM_WORLD, node_of=node_of, deadline=20) as part:
        assert part.all_reduce_async(comm.rank).wait() == sum(ranks)
        assert part.all_reduce(comm.rank) == sum(ranks)
    assert len(opened) >= 1
    assert all(each._receive == MPI.REQUEST_NULL for each in opened)


@pytest.mark.ranks(3, 4, 5)
@pytest.mark.parametrize("nodes", ["halves", "every second", "one apart"])
def test_two_levels(comm, nodes):
    """Every collective that can be made in the memory of nodes and between them."""
    rank, size = comm.rank, comm.size
    maps = {"halves": [each * 2 // size for each in range(size)]} | {
        name: [LAYOUTS[name](each, size) for each in range(size)] for name in LAYOUTS
    }
    with Communicator(MPI.COMM_WORLD, node_of=maps[nodes], deadline=20) as part:
        for length in (0, 1, 11, 3000 * size + 1, 400_000):
            with case("length", length):
                check_two_levels(part, length, in_blocks=nodes == "halves" and size == 4)
        if (nodes, size) != ("halves", 4):
            for call in (part.reduce_scatter, part.all_gather):
                with pytest.raises(ValueError, match="algorithm='hierarchical': there is no such"):
                    call(np.ones(7), algorithm="hierarchical")
        assert part.all_reduce(rank) == sum(range(size))


def check_two_levels(part, length, *, in_blocks):
    rank, size, way = part.rank, part.size, {"algorithm": "hierarchical"}
    array, every = value(rank, length, np.float32), values(size, length, np.float32)
    for op in ("sum", "mean", "max"):
        expected = reduced(op, every)
        np.testing.assert_array_equal(part.all_reduce(array, op, **way), expected)
        for root in range(size):
            result = part.reduce(array, op, root=root, **way)
            assert (result is None) == (rank != root)
            if rank == root:
                np.testing.assert_array_equal(result, expected)
        if in_blocks:
            blocks = np.array_split(expected, size)
            np.testing.assert_array_equal(part.reduce_scatter(array, op, **way), blocks[rank])
    np.testing.assert_array_equal(array, value(rank, length, np.float32))
    for root in range(size):
        np.testing.assert_array_equal(part.broadcast(array.copy(), root=root, **way), every[root])
    if in_blocks:
        rows = [value(each, (length // 3 + each, 3), np.int16) for each in range(size)]
        joined = np.concatenate(rows)
        np.testing.assert_array_equal(part.all_gather(rows[rank], **way), joined)
        out = np.empty_like(joined)
        part.all_gather(rows[rank], out=out, **way)
        np.testing.assert_array_equal(out, joined)


@pytest.mark.ranks(3, 4, 5)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "broadcast"])
def test_large_arrays_are_pipelined(comm, collective):
    """In chunks or whole: both are tried, except where that would change the order of the fold."""
    rank, size = comm.rank, comm.size
    nodes, length, way = (size + 1) // 2, 300_001, {"algorithm": "hierarchical"}
    node_of = [each % nodes for each in range(size)]
    with Communicator(MPI.COMM_WORLD, node_of=node_of, deadline=20) as part:
        for dtype, op in ((np.float32, "mean"), (np.int16, "sum")):
            array, every = value(rank, length * 2, dtype), values(size, length * 2, dtype)
            taken = []
            for _ in range(5):
                with case(collective, dtype, taken):
                    if collective == "broadcast":
                        np.testing.assert_array_equal(
                            part.broadcast(array.copy(), root=1, **way), every[1]
                        )
                    elif collective == "reduce":
                        result = part.reduce(array, op, root=1, **way)
                        assert (result is None) == (rank != 1)
                        if rank == 1:
                            np.testing.assert_array_equal(result, reduced(op, every))
                    else:
                        result = part.all_reduce(array, op, **way)
                        np.testing.assert_array_equal(result, reduced(op, every))
                    taken.append(path_of_last(part))
            if collective == "broadcast" or nodes == 2 or dtype == np.int16:
                assert taken[:4] == ["hierarchical"] * 2 + ["pipelined"] * 2
            else:
                assert taken == ["pipelined"] * 5
            assert set(part.all_gather_object(taken[4])) == {taken[4]}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_large_blocks_are_pipelined(comm, collective):
    pipeline_blocks(comm, collective, 2)


@pytest.mark.slow
@pytest.mark.ranks(6, 8)
@pytest.mark.parametrize("of_a_node", ["half", "two"])
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_large_blocks_of_more_ranks_or_nodes_are_pipelined(comm, collective, of_a_node):
    pipeline_blocks(comm, collective, 2 if of_a_node == "two" else comm.size // 2)


def pipeline_blocks(comm, collective, count):
    """One node's block after the other. Parts may differ in length, and be empty."""
    rank, size, way = comm.rank, comm.size, {"algorithm": "hierarchical"}
    nodes, length = size // count, 150_000
    with Communicator(MPI.COMM_WORLD, node_of=[each // count for each in range(size)]) as part:
        reductions = ((np.float32, "mean"), (np.int16, "sum"), (BFLOAT16, "max"))
        # An all_gather moves bytes: what is known of one dtype holds for all.
        for dtype, op in reductions if collective == "reduce_scatter" else reductions[:1]:
            every, taken = values(size, length * size + 1, dtype), []
            parts = [each[: 0 if peer == 1 else length + peer] for peer, each in enumerate(every)]
            for call in range(5):
                with case(dtype, call):
                    if collective == "reduce_scatter":
                        result = part.reduce_scatter(every[rank], op, **way)
                        expected = np.array_split(reduced(op, every), size)[rank]
                    else:
                        expected = np.concatenate(parts)
                        out = np.empty_like(expected) if call % 2 else None
                        result = part.all_gather(parts[rank], out=out, **way)
                    np.testing.assert_array_equal(result, expected)
                    taken.append(path_of_last(part))
            if collective == "all_gather" or nodes == 2 or dtype == np.int16:
                assert taken[:4] == ["hierarchical"] * 2 + ["pipelined"] * 2
            else:
                assert taken == ["pipelined"] * 5


@pytest.mark.ranks(4)
def test_large_blocks_have_the_same_bits_in_both_ways(comm):
    """The sign of a zero and a complex product depend on the order of the operands."""
    generator = np.random.default_rng(comm.rank)
    factors = generator.normal(size=(500_000, 2)).astype(np.float32).view(np.complex64).ravel()
    zeros = np.copysign(np.zeros(500_000, np.float32), 1 - comm.rank)
    with Communicator(MPI.COMM_WORLD, node_of=[0, 0, 1, 1], deadline=20) as part:
        for array, op in ((factors, "product"), (zeros, "max")):
            results, taken = set(), set()
            for _ in range(4):
                results.add(part.reduce_scatter(array, op, algorithm="hierarchical").tobytes())
                taken.add(path_of_last(part))
            assert taken == {"hierarchical", "pipelined"}
            assert len(results) == 1, op


@pytest.mark.ranks(4)
def test_large_blocks_of_other_sizes_are_tried_anew(comm):
    """What is faster for a size says nothing of others."""
    with Communicator(MPI.COMM_WORLD, node_of=[0, 0, 1, 1], deadline=20) as part:
        for length in (300_000, 1_500_000):
            taken = set()
            for _ in range(4):
                part.all_gather(np.ones(length, np.int32), algorithm="hierarchical")
                taken.add(path_of_last(part))
            assert taken == {"hierarchical", "pipelined"}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("of_one_node", [False, True])
def test_a_wait_in_the_nodes_memory_makes_progress(comm, monkeypatch, of_one_node):
    """What a rank has sent may be delivered only while it is inside of MPI.

    Rank 1 leaves the exchange with rank 3 before its message is delivered, and waits for rank 0,
    which waits for rank 2, which waits for rank 3. It waits in the same communicator, or in one of
    its node alone.
    """
    exchange, progress = MpiTransport.exchange_beside, MpiTransport.progress
    held, delivered = [], []

    def hold(transport, sends, receives, overlapped):
        exchange(transport, [], receives, overlapped)
        held.append((transport, sends))

    def deliver(transport):
        while held:
            transport_of_message, sends = held.pop(0)
            exchange(transport_of_message, sends, [], iter(()))
            delivered.append(len(sends))
        progress(transport)

    with Communicator(MPI.COMM_WORLD, node_of=[0, 0, 1, 1], deadline=3) as part:
        within = part.split(comm.rank // 2)
        if comm.rank == 1:
            monkeypatch.setattr(MpiTransport, "exchange_beside", hold)
            monkeypatch.setattr(MpiTransport, "progress", deliver)
        array = np.full(600_000, comm.rank, np.int16)
        for _ in range(4):
            result = part.broadcast(array.copy(), root=1, algorithm="hierarchical")
            np.testing.assert_array_equal(result, np.full_like(array, 1))
            if not of_one_node:
                assert part.all_reduce(comm.rank) == 6
                continue
            if comm.rank == 2:
                part.send(array, 0)
            elif comm.rank == 0:
                part.recv(array, 2)
            within.barrier()
    assert comm.rank != 1 or sum(delivered) > 0


@pytest.mark.ranks(4)
def test_a_wait_between_nodes_names_ranks_of_the_whole_group(comm, monkeypatch):
    """Rank 3 is late in the middle of a call: rank 1, its partner, waits for it."""

    def late(transport, sends, receives, overlapped):
        time.sleep(5)
        raise TimeoutError

    part = Communicator(MPI.COMM_WORLD, node_of=[0, 0, 1, 1], deadline=20)
    part.barrier()
    part.deadline = 2
    if comm.rank == 3:
        monkeypatch.setattr(MpiTransport, "exchange_beside", late)
    array = np.full(600_000, comm.rank, np.int32)
    with pytest.raises((CollectiveError, TimeoutError)) as caught:
        part.all_reduce(array, algorithm="hierarchical")
    if comm.rank in (1, 2):
        assert "rank 3 in the middle of the call" in str(caught.value), caught.value
    comm.barrier()


@pytest.mark.ranks(4)
def test_waits_within_and_between_nodes_name_ranks_of_the_whole_group(comm):
    with Communicator(MPI.COMM_WORLD, node_of=[0, 1, 0, 1], deadline=20) as part:
        node, number = part._engine.node, comm.rank % 2
        assert node.across.watchdog is part._engine.watchdog
        assert list(node._transport.absent([0, 1])) == [number, number + 2]
        assert list(node.across.transport.absent([0, 1])) == [
            comm.rank - number,
            comm.rank - number + 1,
        ]


@pytest.mark.ranks(3)
def test_a_wait_names_the_ranks_whose_messages_are_not_done(comm):
    """Rank 0 has what it receives, and waits for rank 2 to receive."""
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    large = np.full(4 << 20, comm.rank, np.uint8)
    if comm.rank == 1:
        transport.exchange([(0, large[:8].data)], [])
    transport.comm.Barrier()
    if comm.rank == 0:
        transport.wait_policy.deadline = 0.3
        with pytest.raises(DeadlineExceededError) as caught:
            transport.exchange([(2, large.data)], [(1, np.empty(8, np.uint8).data)])
        assert caught.value.absent == (2,)
    transport.comm.Barrier()
    if comm.rank == 2:
        transport.exchange([], [(0, large.data)])
        assert not large.any()
    transport.comm.Barrier()
    transport.close()


@pytest.mark.ranks(4)
def test_prices_hold_between_the_nodes_too(comm):
    with Communicator(MPI.COMM_WORLD, node_of=[0, 0, 1, 1], deadline=20) as part:
        engine = part._engine
        assert engine.costs == built_in(engine.layout) != CostParameters()
        assert engine.node.across.costs == engine.costs
        part.tune(save=False)
        assert engine.costs != built_in(engine.layout)
        assert engine.node.across.costs == engine.costs


@pytest.mark.ranks(3, 4)
def test_large_messages_of_a_ring_go_in_segments(comm, monkeypatch):
    """Or whole: both are tried, whichever ranks reduce in place."""
    rank, size, exchange, sent = comm.rank, comm.size, MpiTransport.exchange_beside, []

    def record(transport, sends, receives, overlapped):
        sent.extend(len(content) for _, content in sends)
        exchange(transport, sends, receives, overlapped)

    length = size * 100_000 + 1
    array, every = value(rank, length), values(size, length)
    mean = reduced("mean", every)
    parts = np.array_split(mean, size)
    with Communicator(MPI.COMM_WORLD, node_of=range(size), deadline=20) as part:
        monkeypatch.setattr(MpiTransport, "exchange_beside", record)
        calls = {
            "all_reduce": lambda: part.all_reduce(array, "mean", algorithm="ring"),
            "in place": lambda: part.all_reduce(
                own, "mean", out=own if rank else np.empty_like(own), algorithm="ring"
            ),
            "reduce_scatter": lambda: part.reduce_scatter(array, "mean", algorithm="ring"),
            "all_gather": lambda: part.all_gather(parts[rank], algorithm="ring"),
        }
        for name, call in calls.items():
            segmented = []
            for _ in range(5):
                sent.clear()
                own = array.copy()
                with case(name, segmented):
                    expected = parts[rank] if name == "reduce_scatter" else mean
                    np.testing.assert_array_equal(call(), expected)
                    segmented.append(max(sent) <= HostMemory.segment_bytes)
            if name != "in place":
                assert segmented[:4] == [True, True, False, False]
            assert len(set(part.all_gather_object(segmented[4]))) == 1
        # Other sizes, whose times are known by now.
        trials = []
        monkeypatch.setattr(PathTimes, "learn", lambda *times: trials.append(times))
        for less in range(5):
            part.all_reduce(array[less:], "mean", algorithm="ring")
        assert not trials


@pytest.mark.ranks(2)
def test_a_wait_on_one_node_stays_out_of_mpi(comm, monkeypatch):
    """Another thread may be inside of it, where MPI has no MPI_THREAD_MULTIPLE."""
    probed = []
    monkeypatch.setattr(nodes, "_between_nodes", threading.Event())
    monkeypatch.setattr(MpiTransport, "progress", lambda transport: probed.append(transport))
    with Communicator(MPI.COMM_WORLD, deadline=20) as part:
        for _ in range(2):
            time.sleep(0.05 * comm.rank)
            assert part.all_reduce(comm.rank) == 1
    assert not probed


@pytest.mark.ranks(2)
def test_nodes_too_many_for_their_numbers(comm, monkeypatch):
    """With thousands of nodes not even the numbers of rows travel: imitated by a small limit."""
    for module in ("bound.exchanged_rows", "bound.between_nodes"):
        monkeypatch.setattr(f"collectives.{module}.LARGEST_EXCHANGE", 16)
    with Communicator(MPI.COMM_WORLD, node_of=range(comm.size), deadline=20) as part:
        every = [value(each, (1 + each, 2)) for each in range(2)]
        np.testing.assert_array_equal(part.all_gather(every[part.rank]), np.concatenate(every))
        assert path_of_last(part) != "dissemination"
        received = part.all_to_all(np.arange(4) + 10 * part.rank)
        np.testing.assert_array_equal(
            received, [2 * part.rank, 2 * part.rank + 1, 10 + 2 * part.rank, 11 + 2 * part.rank]
        )
        np.testing.assert_array_equal(part.scan(np.ones(9)), np.full(9, part.rank + 1.0))
        assert part.broadcast(np.full(9, part.rank), root=1)[8] == 1
