"""The paths through the ranks' arenas, on a simulated GPU that all ranks (threads) share."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest

from collectives.errors import BackendUnavailableError
from collectives.execution.device_path import Request
from collectives.gpu.ipc_path import IpcPath
from collectives.reductions.reduction import ReduceOp
from collectives.transports import local
from tests.collectives.oracle import BITWISE, defined, values
from tests.devices.ipc_worlds import REDUCTIONS, World, garbage, take_part, uneven
from tests.devices.simulated import ARENA_UNIT
from tests.slow import slow, slow_but

MOVEMENTS = ["broadcast", "all_gather", "gather", "scatter", "all_to_all"]
OF_EACH_KIND = ["all_reduce", "scatter", "all_to_all"]
DTYPES = ["float32", "int16", "bool", "complex64", "float16", ml_dtypes.bfloat16]
HALF_BYTES = ARENA_UNIT // 2
LARGE_BYTES = 5 << 20
SLOW_SECONDS = 0.1

sizes = pytest.mark.parametrize("size", [1, 3, *slow(2, 5)])
collectives = pytest.mark.parametrize("collective", REDUCTIONS + MOVEMENTS)
in_place_or_not = pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "out"])


@sizes
@collectives
@in_place_or_not
def test_result(on_ranks, size, collective, in_place):
    def body(path, rank, meetings):
        for lengths in ([0] * size, [1] * size, uneven(1, size), uneven(200, size)):
            for root in {0, size - 1}:
                options = {"in_place": in_place, "root": root}
                take_part(path, rank, collective, lengths, np.int32, **options)

    on_ranks(size, body)


@pytest.mark.parametrize("collective", slow_but(REDUCTIONS + MOVEMENTS, *OF_EACH_KIND))
@in_place_or_not
def test_more_than_an_arena(on_ranks, collective, in_place):
    def body(path, rank, meetings):
        lengths = uneven(LARGE_BYTES // 4 // (path._size - 1), path._size)
        take_part(path, rank, collective, lengths, np.float32, in_place=in_place, root=1)

    for size in (2, 3):
        on_ranks(size, body)


@collectives
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(on_ranks, collective, dtype):
    ops = [None]
    if collective in REDUCTIONS:
        ops = ["sum", "product", "min", "max", *BITWISE]
        ops = [op for op in ops if defined(op, np.dtype(dtype))]
        # The mean of integers has become one of floats here.
        ops += [] if dtype in ("int16", "bool") else ["mean"]

    def body(path, rank, meetings):
        for op in ops:
            # A third of an element's parts would not fit: blocks end where elements do.
            for length in (7, 40_001):
                lengths = uneven(length, 3)
                take_part(path, rank, collective, lengths, dtype, in_place=False, op=op)

    on_ranks(3, body)


def test_elements_of_any_size_move(on_ranks):
    def body(path, rank, meetings):
        for dtype in ("V3", "V2000001"):
            given = np.frombuffer(
                np.random.default_rng(rank).bytes(2 * np.dtype(dtype).itemsize), dtype
            )
            whole = path._cuda.empty(6, np.dtype(dtype))
            part = path._cuda.from_host(given)
            path.run(Request("all_gather", part, whole, [2, 2, 2], None, 0, None))
            results.setdefault(dtype, []).append(whole.get().tobytes())
            assert whole.get()[2 * rank : 2 * rank + 2].tobytes() == given.tobytes()

    results = {}
    on_ranks(3, body)
    assert all(len(set(found)) == 1 for found in results.values())


@pytest.mark.parametrize("length", [1000, 200_000])
def test_ranks_fold_in_rank_order(on_ranks, length):
    def of(rank):
        return np.random.default_rng(rank).standard_normal(length).astype(np.float32)

    def body(path, rank, meetings):
        array = path._cuda.from_host(of(rank))
        path.run(Request("all_reduce", None, array, None, ReduceOp.SUM, 0, None))
        return array.get().tobytes()

    expected = ((of(0) + of(1)) + of(2)) + of(3)
    assert set(on_ranks(4, body)) == {expected.tobytes()}


@pytest.mark.parametrize("collective", slow_but(REDUCTIONS + MOVEMENTS, *OF_EACH_KIND))
@pytest.mark.parametrize("size", [3, *slow(2)])
def test_calls_in_a_row_while_the_gpu_lags(on_ranks, lags, size, collective):
    """Copies and folds are slow at times: a rank that doesn't wait reads other rounds'."""
    lags.longest = 0.01

    def body(path, rank, meetings):
        for salt, length in enumerate([100, 200, 700_000, 300]):
            lengths = uneven(length, size)
            options = {"in_place": salt % 2 == 0, "root": size - 1, "salt": salt}
            take_part(path, rank, collective, lengths, np.float32, **options)

    on_ranks(size, body)


def test_slow_input_is_waited_for_and_the_result_comes_after_the_callers_stream(on_ranks, cuda):
    def body(path, rank, meetings):
        late, array = cuda.from_host(values(2, 9)[rank]), cuda.from_host(garbage(9, np.float64))
        cuda.slow(cuda.current_stream(), SLOW_SECONDS * (rank + 1))
        array[...] = late
        before = time.monotonic()
        path.run(Request("all_reduce", None, array, None, ReduceOp.SUM, 0, "ipc"))
        assert time.monotonic() - before > SLOW_SECONDS
        cuda.slow(path._stream, 0)
        taken = cuda.from_host(garbage(9, np.float64))
        taken[...] = array
        return taken.get()

    for result in on_ranks(2, body):
        np.testing.assert_array_equal(result, sum(values(2, 9)))


def test_the_host_does_not_wait_for_the_last_reading(on_ranks, cuda, monkeypatch):
    fold, may_read, both = cuda.fold, threading.Event(), threading.Barrier(2)
    allowed = []

    def held_back(*arguments):
        cuda.put(cuda.current_stream(), lambda: allowed.append(may_read.wait(10)))
        fold(*arguments)

    monkeypatch.setattr(cuda, "fold", held_back)

    def body(path, rank, meetings):
        array, caller = cuda.from_host(values(2, 9)[rank]), cuda.current_stream()
        path.run(Request("all_reduce", None, array, None, ReduceOp.SUM, 0, None))
        event = caller.record()
        with pytest.raises(TimeoutError, match=r"not done after 0\.0 s"):
            path.wait("all_reduce", event, 0.0)
        both.wait(20)
        may_read.set()
        path.wait("all_reduce", event, None)
        assert event.done()
        np.testing.assert_array_equal(array.get(), sum(values(2, 9)))

    on_ranks(2, body)
    assert allowed == [True] * 2


def test_meetings(on_ranks, cuda):
    def body(path, rank, meetings):
        def count(collective, nbytes, lengths=None, op=ReduceOp.SUM):
            before = meetings()
            source, target = cuda.empty(nbytes, np.dtype("u1")), cuda.empty(nbytes, np.dtype("u1"))
            if collective == "reduce_scatter":
                target = target[: lengths[rank]]
            path.run(Request(collective, source, target, lengths, op, 0, None))
            return meetings() - before

        size = path._size
        assert count("all_reduce", 0) == 0
        assert count("all_reduce", 256 << 10) == 1
        assert count("all_reduce", HALF_BYTES) == (1 if size == 2 else 2)
        assert count("all_reduce", HALF_BYTES + 1) == (2 if size == 2 else 4)
        assert count("reduce", HALF_BYTES) == 1
        assert count("reduce_scatter", size * 9, [9] * size) == 1
        assert count("broadcast", 3 * HALF_BYTES, op=None) == 3
        assert count("all_gather", 9, [9, *[0] * (size - 1)], None) == 1
        assert count("gather", size * 9, [9] * size, None) == 1
        assert count("scatter", size * 9, [9] * size, None) == 1
        assert count("all_to_all", 2 * size * 9, [9] * 2 * size, None) == 2
        assert count("all_to_all", 0, [0] * 2 * size, None) == 1

    on_ranks(2, body)
    on_ranks(3, body)


def test_a_rank_without_a_part_takes_part_in_an_all_to_all(on_ranks, cuda):
    def body(path, rank, meetings):
        lengths = [[0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0] * 6][rank]
        array = cuda.from_host(np.full(sum(lengths), [7.0, 1.0, 2.0][rank]))
        path.run(Request("all_to_all", None, array, lengths, None, 0, None))
        return array.get().tolist()

    assert on_ranks(3, body) == [[7.0], [7.0], []]


def test_what_is_refused(on_ranks, cuda):
    def body(path, rank, meetings):
        def run(dtype, op, algorithm=None):
            array = cuda.empty(4, np.dtype(dtype))
            path.run(Request("all_reduce", None, array, None, op, 0, algorithm))

        before = meetings()
        with pytest.raises(ValueError, match=r"algorithm='ring'.* 'ipc' alone"):
            run("f4", ReduceOp.SUM, "ring")
        with pytest.raises(TypeError, match="float8_e5m2"):
            run(ml_dtypes.float8_e5m2, ReduceOp.SUM)
        with pytest.raises(TypeError, match="no order"):
            run("c8", ReduceOp.MAX)
        with pytest.raises(RuntimeError, match="graph"):
            path.check_capture("broadcast", None, np.dtype("f4"))
        assert meetings() == before

    on_ranks(2, body)


@pytest.mark.parametrize("method", ["allocate_arena", "export_arena", "open_arena"])
@pytest.mark.parametrize("failing", [0, 2])
def test_one_rank_that_fails_to_open_is_everybodys_error(cuda, monkeypatch, method, failing):
    does = getattr(cuda, method)
    tried = []

    def fail(*arguments):
        if cuda.rank == failing:
            tried.append(arguments)
            if method != "open_arena" or len(tried) == 2:
                raise OSError("no more")
        return does(*arguments)

    monkeypatch.setattr(cuda, method, fail)
    world = World(3)

    def one_rank(transport):
        cuda.be_rank(transport.rank, 0)
        with pytest.raises(BackendUnavailableError) as raised:
            world.path(cuda, transport.rank)
        return str(raised.value)

    assert set(local.run(3, one_rank)) == {f"CUDA IPC: rank {failing}: OSError: no more"}
    assert not cuda.open_arenas


def test_a_rank_that_goes_while_the_others_open(cuda):
    cuda.be_rank(1, 0)
    handle = cuda.export_arena(cuda.allocate_arena(ARENA_UNIT))
    cuda.be_rank(0, 0)

    def gather(content):
        opened.append([arena.openers.copy() for arena in cuda.open_arenas.values()])
        if len(opened) == 2:
            raise TimeoutError("rank 1")
        return [content, handle]

    opened = []
    with pytest.raises(TimeoutError, match="rank 1"):
        IpcPath(cuda, 0, 2, barrier=pytest.fail, gather=gather, arena_bytes=ARENA_UNIT)
    assert opened == [[[], []], [[0], []]]
    # Its own stays: rank 1 may have it open.
    assert [(arena.owner, arena.openers) for arena in cuda.open_arenas.values()] == [
        (1, []),
        (0, []),
    ]


def test_slots_are_aligned(on_ranks, cuda):
    def body(path, rank, meetings):
        for current in path._rounds([], 1, 3, np.dtype(np.uint8)):
            for slot in range(3):
                assert cuda.address(current.at(0, slot, current.most)) % 16 == 0

    on_ranks(1, body)


def test_abandoning_closes_what_was_opened_and_keeps_ones_own(cuda, monkeypatch):
    world = World(3)

    def refuse(arena):
        closed.append(cuda.rank)
        raise RuntimeError("an error that sticks to the GPU")

    def one_rank(transport):
        cuda.be_rank(transport.rank, 0)
        path = world.path(cuda, transport.rank)
        world.barrier.wait()
        if transport.rank == 2:
            path.abandon()
            path.abandon()
        world.barrier.wait()
        if transport.rank == 0:
            openers = {arena.owner: sorted(arena.openers) for arena in cuda.open_arenas.values()}
            assert openers == {0: [1], 1: [0], 2: [0, 1]}
            monkeypatch.setattr(cuda, "close_arena", refuse)
            path.abandon()

    closed = []
    local.run(3, one_rank)
    assert closed == [0]
    assert len(cuda.open_arenas) == 3
