"""The simulated GPU can fail where a real one does: otherwise tests on it would show nothing."""

import contextlib
import time
from functools import partial

import numpy as np
import pytest

from collectives.reductions.reduction import ReduceOp
from collectives.transports import local
from collectives.transports.nccl_driver import NcclError
from tests.devices.simulated import ARENA_UNIT, SimulatedCuda
from tests.devices.simulated_arrays import OnDevice, plain
from tests.devices.simulated_memory import GARBAGE
from tests.devices.simulated_nccl import DTYPES, SimulatedNccl

SUM, MAX, AVERAGE, FLOAT32 = 0, 2, 4, 7
SLOW_SECONDS = 0.5


@pytest.fixture
def cuda():
    with contextlib.closing(SimulatedCuda()) as cuda:
        yield cuda


@pytest.fixture
def on_ranks(cuda):
    """`on_ranks(size, function)` calls function(nccl, comm, stream) on as many ranks."""
    nccl = SimulatedNccl(cuda)

    def run(size, function):
        cuda.be_rank(0)
        unique_id = nccl.unique_id()

        def one_rank(transport):
            cuda.be_rank(transport.rank, transport.rank)
            comm = nccl.init_rank(size, unique_id, transport.rank)
            stream = cuda.new_stream()
            result = function(nccl, comm, stream)
            if not comm.ended:
                stream.synchronize()
                nccl.destroy(comm)
            return result

        results = local.run(size, one_rank)
        assert not nccl.alive()
        return results

    return run


def all_reduce(nccl, comm, source, target, op, stream):
    dtype = DTYPES.index(source.dtype)
    addresses = (nccl.cuda.address(source), nccl.cuda.address(target))
    nccl.all_reduce(comm, *addresses, source.size, dtype, op, stream.handle)


def until_error(nccl, comm):
    until = time.monotonic() + 30
    while (error := nccl.async_error(comm)) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return error


def test_a_result_that_is_not_waited_for_is_garbage(cuda, on_ranks):
    def reduced(nccl, comm, stream):
        source = cuda.from_host(np.full(4, comm.rank + 1, np.float32))
        target = cuda.empty(4, np.dtype(np.float32))
        cuda.slow(stream, SLOW_SECONDS)
        all_reduce(nccl, comm, source, target, SUM, stream)
        early = target.get()
        cuda.current_stream().wait(stream.record())
        return early, target.get()

    for early, late in on_ranks(2, reduced):
        assert set(early.tobytes()) == {GARBAGE}
        assert late.tolist() == [3] * 4


def test_only_who_waits_for_the_event_of_a_slow_stream_sees_its_data(cuda):
    array, copied = cuda.from_host(np.ones(3)), cuda.pinned(24).view(np.float64)
    slow, hasty, patient = cuda.new_stream(), cuda.new_stream(), cuda.new_stream()
    with cuda.on(slow):
        cuda.slow(slow, SLOW_SECONDS)
        cuda.fold(ReduceOp.SUM, array, array, array)
        event = slow.record()
    patient.wait(event)
    seen = []
    for stream in (hasty, patient):
        with cuda.on(stream):
            cuda.copy_to_host(array, copied)
        stream.synchronize()
        seen.append((event.done(), copied.tolist()))
    assert seen == [(False, [1] * 3), (True, [2] * 3)]


@pytest.mark.parametrize(
    ("dtype", "op", "values", "expected"),
    [("float32", MAX, (np.nan, 1), 1), ("int32", AVERAGE, (-3, 0), -1)],
)
def test_reductions_lose_what_nccl_loses(cuda, on_ranks, dtype, op, values, expected):
    def reduced(nccl, comm, stream):
        array = cuda.from_host(np.array([values[comm.rank]], dtype))
        all_reduce(nccl, comm, array, array, op, stream)
        stream.synchronize()
        return array.get()[0]

    assert on_ranks(2, reduced) == [expected] * 2


def test_a_mismatched_collective_hangs_until_it_is_aborted(cuda, on_ranks):
    def mismatched(nccl, comm, stream):
        array = cuda.from_host(np.ones(8, np.float32))
        all_reduce(nccl, comm, array[: 4 + comm.rank], array[: 4 + comm.rank], SUM, stream)
        event = stream.record()
        error = until_error(nccl, comm)
        time.sleep(0.02)
        hung = not event.done()
        nccl.abort(comm)
        stream.synchronize()
        return error.status, hung, event.done(), array.get().tolist()

    assert on_ranks(2, mismatched) == [(5, True, True, [1] * 8)] * 2


def test_an_abort_ends_the_wait_of_its_own_rank_alone(cuda, on_ranks):
    def left_alone(nccl, comm, stream):
        array = cuda.from_host(np.ones(2, np.float32))
        if comm.rank == 0:
            nccl.abort(comm)
            return True
        all_reduce(nccl, comm, array, array, SUM, stream)
        event = stream.record()
        hung = not event.reached.wait(0.02)
        with pytest.raises(AssertionError, match="pending"):
            nccl.destroy(comm)
        nccl.abort(comm)
        stream.synchronize()
        return hung

    assert on_ranks(2, left_alone) == [True, True]


def test_a_graph_replays_with_new_values(cuda, on_ranks):
    def replayed(nccl, comm, stream):
        array, side = cuda.from_host(np.zeros(2, np.float32)), cuda.new_stream()
        stream.begin_capture()
        with cuda.on(stream):
            cuda.divide(array, 2)
            side.wait(stream.record())
            all_reduce(nccl, comm, array, array, SUM, side)
            with pytest.raises(RuntimeError, match="capture"):
                stream.record().done()
            stream.wait(side.record())
            array += 1
        graph = stream.end_capture()
        results = [array.get().tolist()]
        for value in (2, 4):
            array[...] = value
            graph.launch(stream)
            stream.synchronize()
            results.append(array.get().tolist())
        return results

    assert on_ranks(2, replayed) == [[[0, 0], [3, 3], [5, 5]]] * 2


CAPTURED = {
    "device memory": lambda cuda, array: cuda.empty(1, np.dtype(np.int8)),
    "pinned memory": lambda cuda, array: cuda.pinned(8),
    "arithmetic": lambda cuda, array: array + array,
    "a wait": lambda cuda, array: cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("what", CAPTURED)
def test_an_allocation_or_a_wait_ends_a_capture(cuda, what):
    """Also one on another stream of the thread, but for a wait, which is for one stream."""
    array, stream, other = cuda.from_host(np.ones(1)), cuda.new_stream(), cuda.new_stream()
    for current in (stream, other):
        stream.begin_capture()
        with cuda.on(current):
            if current is stream or what != "a wait":
                with pytest.raises(RuntimeError, match="during capture"):
                    CAPTURED[what](cuda, array)
                with pytest.raises(RuntimeError, match="can't be captured"):
                    stream.end_capture()
            else:
                CAPTURED[what](cuda, array)
                stream.end_capture()
    assert (array + array).get().tolist() == [2]


# --- freed memory --------------------------------------------------------------------------------


def test_freed_memory_is_overwritten_and_reused_in_the_order_of_its_stream(cuda):
    stream, other = cuda.new_stream(), cuda.new_stream()
    target, late = (cuda.from_host(np.zeros(4, np.float32)) for _ in range(2))
    with cuda.on(stream):
        array = cuda.from_host(np.arange(4, dtype=np.float32))
        address, raw = cuda.address(array), plain(array)
        cuda.put(stream, partial(np.copyto, plain(target), raw))
        cuda.slow(other, SLOW_SECONDS)
        cuda.put(other, partial(np.copyto, plain(late), raw))
        assert cuda.owns(address, 16)
        view = array[1:3]
        del array
        assert cuda.owns(address, 16), "a view holds it"
        del view
        assert not cuda.owns(address, 16)
    with cuda.on(other):
        assert cuda.address(cuda.empty(4, np.dtype("f4"))) != address
    with cuda.on(stream):
        again = cuda.empty(3, np.dtype("i4"))
        assert cuda.address(again) == address
        assert set(again.get().tobytes()) == {GARBAGE}
        assert target.get().tolist() == [0, 1, 2, 3]
    other.synchronize()
    assert set(plain(late).tobytes()) == {GARBAGE}


def test_memory_that_only_a_graph_uses_is_reused(cuda):
    stream, target = cuda.new_stream(), cuda.from_host(np.zeros(4, np.float32))
    with cuda.on(stream):
        array = cuda.from_host(np.ones(4, np.float32))
        stream.begin_capture()
        target[...] = array
        del array
        graph = stream.end_capture()
        graph.launch(stream)
        assert set(target.get().tobytes()) == {GARBAGE}


def test_pinned_memory_is_reused_whatever_copies_are_under_way(cuda):
    stream, target = cuda.new_stream(), cuda.from_host(np.zeros(8, np.uint8))
    with cuda.on(stream):
        pinned = cuda.pinned(8)
        pinned[:] = 3
        address = pinned.ctypes.data
        cuda.slow(stream, SLOW_SECONDS)
        cuda.copy_to_device(pinned, target)
        del pinned
        assert cuda.pinned(8).ctypes.data == address
        assert set(target.get().tobytes()) == {GARBAGE}


def test_a_capture_must_be_joined(cuda):
    stream, side, array = cuda.new_stream(), cuda.new_stream(), cuda.from_host(np.ones(1))
    outside = side.record()
    stream.begin_capture()
    with pytest.raises(RuntimeError, match="capture"):
        stream.wait(outside)
    side.wait(stream.record())
    with cuda.on(side):
        cuda.divide(array, 2)
    with pytest.raises(RuntimeError, match="doesn't wait"):
        stream.end_capture()


def test_source_and_target_overlap_as_in_place_calls_do_or_not_at_all(cuda, on_ranks):
    def gathered(nccl, comm, stream):
        whole = cuda.from_host(np.full(4, comm.rank, np.float32))
        address, own = cuda.address(whole), cuda.address(whole) + 8 * comm.rank
        other = cuda.address(whole) + 8 * (1 - comm.rank)
        with pytest.raises(AssertionError, match="overlap"):
            nccl.all_gather(comm, other, address, 2, FLOAT32, stream.handle)
        nccl.all_gather(comm, own, address, 2, FLOAT32, stream.handle)
        with pytest.raises(AssertionError, match="overlap"):
            nccl.reduce_scatter(comm, address, other, 2, FLOAT32, SUM, stream.handle)
        nccl.reduce_scatter(comm, address, own, 2, FLOAT32, SUM, stream.handle)
        with pytest.raises(AssertionError, match="overlap"):
            nccl.all_reduce(comm, address, address + 4, 2, FLOAT32, SUM, stream.handle)
        stream.synchronize()
        return whole.get().tolist()

    assert on_ranks(2, gathered) == [[0, 0, 1, 1], [0, 0, 2, 2]]


def test_a_group_exchanges_where_single_sends_would_hang(cuda, on_ranks):
    def exchanged(nccl, comm, stream):
        source = cuda.from_host(np.arange(2, dtype=np.float32) + 10 * comm.rank)
        target = cuda.empty(2, source.dtype)
        nccl.group_start()
        for peer in range(2):
            nccl.send(comm, cuda.address(source[peer]), 1, FLOAT32, peer, stream.handle)
        for peer in range(2):
            nccl.receive(comm, cuda.address(target[peer]), 1, FLOAT32, peer, stream.handle)
        nccl.group_end()
        stream.synchronize()
        return target.get().tolist()

    assert on_ranks(2, exchanged) == [[0, 10], [1, 11]]


def test_calls_fail_where_they_are_told_to(cuda, on_ranks):
    def failing(nccl, comm, stream):
        array = cuda.from_host(np.ones(1, np.float32))
        nccl.fail_next(comm.rank, "all_reduce", 6)
        nccl.group_start()
        with pytest.raises(NcclError, match="remote error"):
            all_reduce(nccl, comm, array, array, SUM, stream)
        with pytest.raises(NcclError, match="remote error"):
            nccl.group_end()
        with pytest.raises(NcclError, match="invalid argument"):
            nccl.all_reduce(comm, 0, 0, 1, 12, SUM, stream.handle)
        return [name for name, _ in nccl.calls[comm.rank] if name != "unique_id"]

    names = ["init_rank", "group_start", "all_reduce", "group_end", "all_reduce"]
    assert on_ranks(2, failing) == [names] * 2


def test_device_arrays_do_not_mix_with_the_hosts(cuda):
    array, host = cuda.from_host(np.ones(2)), np.ones(2)
    for mixed in (
        lambda: array + host,
        lambda: host * array,
        lambda: array.__setitem__(slice(None), host),
        lambda: np.copyto(host, array),
        lambda: float(array[0]),
        lambda: array.__array__(),
    ):
        with pytest.raises(TypeError):
            mixed()
    assert (array.sum() + 1).get() == 3
    assert type(array.astype(np.float32).reshape(2, 1)[0]) is OnDevice


def test_foreign_streams_and_ones_own_wait_for_each_other(cuda):
    given = cuda.foreign(np.ones(2))
    with cuda.on(given.stream):
        cuda.slow(given.stream, SLOW_SECONDS)
        cuda.divide(given.memory, 2)
    array = cuda.array(given)
    array += 1
    cuda.slow(cuda.current_stream(), SLOW_SECONDS)
    cuda.divide(array, 3)
    cuda.hand_back(given)
    assert given.get().tolist() == [0.5, 0.5]
    assert cuda.export(array, given).get().tolist() == [0.5, 0.5]


def test_arenas_are_opened_by_others_and_closed_before_they_are_freed(cuda):
    arena = cuda.allocate_arena(ARENA_UNIT)
    handle = cuda.export_arena(arena)
    with pytest.raises(RuntimeError, match="exported"):
        cuda.open_arena(handle, ARENA_UNIT)
    cuda.be_rank(1, 1)
    with pytest.raises(RuntimeError, match="another GPU"):
        cuda.open_arena(handle, ARENA_UNIT)
    cuda.be_rank(1, 0)
    opened = cuda.open_arena(handle, ARENA_UNIT)
    opened[:4] = 7
    cuda.be_rank(0, 0)
    assert arena[:5].get().tolist() == [7] * 4 + [GARBAGE]
    with pytest.raises(RuntimeError, match="have open"):
        cuda.free_arena(arena)
    cuda.be_rank(1, 0)
    cuda.close_arena(opened)
    cuda.be_rank(0, 0)
    cuda.free_arena(arena)
    assert not cuda.open_arenas


def test_an_error_on_a_stream_comes_out_once():
    cuda = SimulatedCuda()
    stream = cuda.new_stream()
    cuda.put(stream, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    stream.synchronize()
    cuda.put(stream, lambda: 1 / 0)
    event = stream.record()
    end = time.monotonic() + 20
    while not event.done() and time.monotonic() < end:
        time.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        cuda.close()
