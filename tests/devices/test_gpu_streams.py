"""The order of streams, handles, and arrays on different devices than the others'."""

import gc
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from collectives import MismatchError, OpMismatchError
from collectives.arrays.kinds import copied
from collectives.bound import calls as bound_calls
from collectives.execution import executor
from tests.devices import simulated_kernels  # noqa: F401  fills the simulator's kernels
from tests.devices.gpu_worlds import run, same
from tests.devices.simulated_arrays import Foreign, memory_at, plain


def test_arrays_of_other_libraries_keep_their_order():
    def program(comm, cuda):
        stream = cuda.new_stream()
        given = cuda.foreign(np.zeros(4, np.float32), stream)
        cuda.slow(stream, 0.1)
        memory = given.memory
        cuda.put(stream, lambda: plain(memory).fill(comm.rank + 1))
        result = comm.all_reduce(given)
        assert type(result) is Foreign
        np.testing.assert_array_equal(result.get(), np.full(4, 3, np.float32))
        assert comm.all_reduce(given, out=given) is given
        np.testing.assert_array_equal(given.get(), np.full(4, 3, np.float32))
        frozen = cuda.foreign(np.zeros(4, np.float32), stream, read_only=True)
        with pytest.raises(ValueError, match="read-only"):
            comm.all_reduce(given, out=frozen)

    run(2, program, backend="nccl")


CALLS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")


def test_tensors_take_bound_calls(monkeypatch):
    """Other libraries' arrays stand for torch's: a call follows their stream, and it the call."""
    monkeypatch.setattr(bound_calls, "is_torch", lambda array: isinstance(array, Foreign))
    expected = {
        "all_reduce": [3, 3],
        "reduce": [3, 3],
        "broadcast": [2, 2],
        "all_gather": [1, 1, 2, 2],
        "reduce_scatter": [3],
    }

    def program(comm, cuda):
        stream, made_calls, find = cuda.new_stream(), [], comm._calls.find_on_gpu

        def noted(collective, array, **options):
            found = find(collective, array, **options)
            made_calls.append((collective, found is not None))
            return found

        comm._calls.find_on_gpu = noted

        def made(shape, value):
            array = cuda.foreign(np.zeros(shape, np.float32), stream)
            cuda.slow(stream, 0.01 + 0.02 * comm.rank)
            memory = array.memory
            cuda.put(stream, lambda: plain(memory).fill(value))
            return array

        def check(collective, result):
            assert type(result) is Foreign
            assert result.stream is stream
            # Before the host waits for any stream.
            found, memory = [], result.memory
            cuda.put(stream, lambda: found.append(plain(memory).tolist()))
            stream.synchronize()
            assert found == [expected[collective]], collective

        for turn in range(3):
            for collective in CALLS:
                rooted = {"root": 1} if collective in ("reduce", "broadcast") else {}
                call = getattr(comm, collective)
                start = getattr(comm, f"{collective}_async")
                results = [call(made(2, comm.rank + 1), **rooted)]
                results.append(start(made(2, comm.rank + 1), **rooted).wait())
                if collective != "broadcast":
                    out = made(len(expected[collective]), -1)
                    results.append(call(made(2, comm.rank + 1), out=out, **rooted))
                    assert results[-1] is (None if results[0] is None else out)
                for result in results:
                    if collective != "reduce" or comm.rank == 1:
                        check(collective, result)
                    else:
                        assert result is None
                if collective != "broadcast":
                    array = made(2, comm.rank + 1)
                    result = call(array, **rooted)
                    # What was read is overwritten by the next work of its stream.
                    memory = array.memory
                    cuda.put(stream, lambda memory=memory: plain(memory).fill(-9))
                    if result is not None:
                        check(collective, result)
            if turn == 0:
                made_calls.clear()
        assert set(made_calls) == {(collective, True) for collective in CALLS}

    run(2, program, backend="nccl")


def test_wrong_arguments_are_refused_at_once_where_calls_are_bound():
    def program(comm, cuda):
        array = cuda.from_host(np.ones(2, np.float32))
        starts = [getattr(comm, f"{collective}_async") for collective in CALLS]
        for _ in range(2):
            for start in starts:
                start(array).wait()
        for start in starts:
            for wrong in ({"foo": None}, {"array": array}, {"collective": 1}):
                with pytest.raises(TypeError):
                    start(array, **wrong)
            with pytest.raises((TypeError, ValueError)):
                start(array, None)
            with pytest.raises((TypeError, ValueError)):
                start(array, "nonsense")
            with pytest.raises(TypeError):
                start(array, "sum", array)
        refused = [
            (comm.all_reduce, {"op": None}),
            (comm.all_reduce_async, {"root": 0}),
            (comm.all_reduce_async, {"axis": 0}),
            (comm.reduce_async, {"root": 2}),
            (comm.reduce_async, {"root": "0"}),
            (comm.broadcast_async, {"out": array}),
            (comm.all_gather_async, {"root": 0}),
            (comm.all_reduce_async, {"out": cuda.from_host(np.ones(3, np.float32))}),
        ]
        # Twice: what is bound is bound in the first of them.
        for call, wrong in refused * 2:
            with pytest.raises((TypeError, ValueError)):
                call(array, **wrong)
        with pytest.raises(TypeError, match="multiple values"):
            comm.all_reduce_async(array, "sum", op="sum")
        comm.close()
        for start in starts:
            with pytest.raises(RuntimeError, match="closed"):
                start(array)

    run(2, program, backend="nccl")


def test_a_reduction_to_one_rank_is_not_captured():
    def program(comm, cuda):
        stream = cuda.new_stream()
        with cuda.on(stream):
            array = cuda.from_host(np.ones(2, np.float32))
            for call in (comm.reduce, comm.reduce_async):
                for _ in range(2):
                    call(array, out=array)
                stream.synchronize()
                stream.begin_capture()
                with pytest.raises(RuntimeError, match="captur"):
                    call(array, out=array)
                # The other rank may have allocated memory, which has ended it.
                with suppress(RuntimeError):
                    stream.end_capture()

    run(2, program, backend="nccl")


def test_the_caller_waits_on_its_stream_and_not_on_the_host():
    """The call waits for earlier work on the stream, and later work waits for the call."""
    order = []

    def program(comm, cuda):
        mine = cuda.new_stream()
        with cuda.on(mine):
            array = cuda.from_host(np.zeros(2, np.float32))
            cuda.slow(mine, 0.2)
            cuda.put(mine, lambda: plain(array).fill(comm.rank + 1))
            result = comm.all_reduce(array)
            order.append("returned")
            cuda.put(mine, lambda: order.append(float(plain(result)[0])))
            mine.synchronize()

    run(2, program, backend="nccl")
    assert order == ["returned", "returned", 3.0, 3.0]


def test_the_caller_computes_while_an_asynchronous_call_runs():
    """Its stream waits for the call's ranks in no way; the next blocking call does."""

    def program(comm, cuda):
        first = cuda.from_host(np.ones(2, np.float32))
        comm.all_reduce(first, out=first)
        mine, order = cuda.new_stream(), []
        with cuda.on(mine):
            array = cuda.from_host(np.full(2, comm.rank + 1, np.float32))
            if comm.rank:
                cuda.slow(mine, 0.3)  # rank 0 waits for it
            handle = comm.all_reduce_async(array)
            cuda.put(mine, lambda: order.append("computed"))
            if comm.rank == 0:
                mine.synchronize()
                assert order == ["computed"]
                assert not handle.done()
        result = comm.all_reduce(first)
        same(result, np.full(2, 4, np.float32))
        assert handle.done()
        same(handle.wait(), np.full(2, 3, np.float32))

    run(2, program, backend="nccl")


def test_inputs_of_an_asynchronous_call_are_held_and_the_handle_may_be_dropped():
    def program(comm, cuda):
        comm.all_reduce(cuda.from_host(np.ones(2, np.float32)))
        outs = [cuda.from_host(np.zeros(2, np.float32)) for _ in range(3)]
        with comm._devices.beside(None):
            cuda.slow(cuda.current_stream(), 0.2)
        given = [cuda.from_host(np.full(2, comm.rank + 1, np.float32)) for _ in range(3)]
        comm.all_reduce_many_async(given[:2], out=outs[:2])
        comm.all_reduce_async(given[2], out=outs[2])
        del given
        for _ in range(8):
            cuda.from_host(np.full(2, 7, np.float32))  # which takes the memory, if it is free
        comm.all_reduce(cuda.from_host(np.ones(2, np.float32)))
        for out in outs:
            same(out, np.full(2, 3, np.float32))

    run(2, program, backend="nccl")


def busy(comm, cuda):
    """Keep the stream of asynchronous calls busy for a while."""
    comm.all_reduce(cuda.from_host(np.ones(2, np.float32)))
    with comm._devices.beside(None):
        cuda.slow(cuda.current_stream(), 0.3)


@pytest.mark.parametrize("strided", [False, True])
def test_lists_may_change_before_an_asynchronous_call_is_done(strided):
    """Also the caller's own results may be dropped: their memory isn't used again before."""

    def program(comm, cuda):
        wide = [cuda.from_host(np.full((2, 2), comm.rank + 1, np.float32)) for _ in range(4)]
        given = [each[:, 0] if strided else each for each in wide[:2]]
        outs = [each[:, 1] if strided else cuda.from_host(np.zeros((2, 2), "f4")) for each in wide]
        kept, expected = list(outs[2:]), np.full(given[0].shape, 3, np.float32)
        busy(comm, cuda)
        comm.all_reduce_many_async(given)
        handle = comm.all_reduce_many_async(given, out=outs[2:])
        given.clear()
        outs.clear()
        del wide
        others = [cuda.empty(2, np.dtype(np.float32)) for _ in range(16)]
        for other in others:
            cuda.put(cuda.current_stream(), partial(plain(other).fill, 9))
        handle.wait()
        for each in kept:
            same(copied(each), expected)
        for other in others:
            same(other, np.full(2, 9, np.float32))

    run(2, program, backend="nccl")


def test_memory_of_a_result_is_used_again_after_the_stream_that_used_it():
    def program(comm, cuda):
        busy(comm, cuda)
        first, second = cuda.new_stream(), cuda.new_stream()
        with cuda.on(first):
            result = comm.all_gather_async(cuda.from_host(np.full(2, comm.rank, "f4"))).wait()
            seen = np.zeros(4, np.float32)
            read = memory_at(cuda.address(result), 4, np.float32)
            cuda.slow(first, 0.3)
            cuda.put(first, partial(np.copyto, seen, read))
            del result
        with cuda.on(second):
            comm.all_gather_async(cuda.from_host(np.full(2, 9, np.float32))).wait()
        first.synchronize()
        np.testing.assert_array_equal(seen, [0, 0, 1, 1])

    run(2, program, backend="nccl")


def test_what_is_used_is_held_until_it_is_done():
    def program(comm, cuda):
        array = cuda.from_host(np.full(2, comm.rank, np.float32))
        comm.all_reduce(array)
        cuda.slow(cuda.current_stream(), 1)
        comm.all_reduce(array, out=array)
        launched = comm._devices._path._launches._launched
        assert any(held is not None and held.base is array.base for held in launched[-1].held)
        cuda.current_stream().synchronize()
        end = time.monotonic() + 5
        while launched and time.monotonic() < end:
            time.sleep(0.02)
        assert not launched

    run(2, program, backend="nccl")


def test_a_handle_waits_for_the_gpu():
    def program(comm, cuda):
        cuda.slow(cuda.current_stream(), 1)
        values = cuda.empty(2, np.dtype(np.float32))
        plain(values)[...] = comm.rank + 1
        handle = comm.all_reduce_async(values)
        assert not handle.done()
        with pytest.raises(TimeoutError):
            handle.wait(0.01)
        result = handle.wait()
        assert handle.done()
        assert handle.wait() is result
        np.testing.assert_array_equal(plain(result), [3, 3])
        bad = comm.all_reduce_async(values, "sum" if comm.rank else "max")
        with pytest.raises(OpMismatchError):
            bad.wait()
        same(comm.broadcast_async(values, root=1).wait(), np.full(2, 2, np.float32))
        same(comm.all_gather_async(values).wait(), np.full(4, 2, np.float32))
        same(comm.reduce_scatter_async(values).wait(), np.full(1, 4, np.float32))
        plain(values)[...] = comm.rank + 1
        for handle, expected in (
            (comm.reduce_async(values, "max"), np.full(2, 2, np.float32)),
            (comm.gather_async(values), np.array([1, 1, 2, 2], np.float32)),
        ):
            result = handle.wait()
            assert result is None if comm.rank else same(result, expected) is None
        for sent, received in enumerate(comm.all_to_all_async([values, values]).wait()):
            same(received, np.full(2, sent + 1, np.float32))
        same(comm.scan(values), np.full(2, 1 + 2 * comm.rank, np.float32))
        same(comm.exscan_async(values).wait(), np.full(2, comm.rank, np.float32))
        with pytest.raises(TypeError, match="scatter_async: the array lies on a GPU"):
            comm.scatter_async(None if comm.rank else values).wait()
        comm.barrier_async().wait()

    run(2, program, backend="nccl")


@pytest.mark.parametrize("backend", ["auto", "mpi", "nccl"], ids="over {}".format)
def test_a_gpus_array_never_meets_a_hosts(backend):
    def program(comm, cuda):
        host = np.ones(2, np.float32)
        with pytest.raises(MismatchError, match="on a GPU"):
            comm.all_reduce(host if comm.rank else cuda.from_host(host))
        with pytest.raises(TypeError, match="out lies on the CPU: must lie on a GPU"):
            comm.all_reduce(cuda.from_host(host), out=host)
        with pytest.raises(TypeError, match="out lies on a GPU: must lie on the CPU"):
            comm.all_reduce(host, out=cuda.from_host(host))
        with pytest.raises(TypeError, match="some lie on a GPU"):
            comm.all_to_all([host, cuda.from_host(host)])
        same(comm.all_reduce(cuda.from_host(host)), 2 * host)
        np.testing.assert_array_equal(comm.all_reduce(host), 2 * host)

    run(2, program, backend=backend)


def test_messages_between_two_ranks():
    def program(comm, cuda):
        values = np.arange(6, dtype=np.float32).reshape(2, 3)
        if comm.rank == 0:
            comm.send(cuda.from_host(values), 1, tag=4)
            comm.send(cuda.from_host(values).reshape(3, 2)[:, 0], 1)
        else:
            last = comm.recv(cuda.empty(3, np.dtype("f4")), 0)
            same(last, values.reshape(3, 2)[:, 0])
            same(comm.recv(cuda.empty((2, 3), np.dtype("f4")), 0, tag=4), values)
        peer = 1 - comm.rank
        arrived = comm.irecv(cuda.empty((2, 3), np.dtype("f4")), peer)
        sent = comm.isend(cuda.from_host(values + comm.rank), peer)
        same(arrived.wait(), values + peer)
        sent.wait()

    run(2, program, backend="nccl")


def test_registered_arrays_lie_on_the_gpu_where_nccl_was_asked_for():
    def program(comm, cuda):
        array = comm.zeros((2, 2))
        assert cuda.owns(cuda.address(array), array.nbytes)
        same(array, np.zeros((2, 2), np.float32))

    run(2, program, backend="nccl")


def test_a_graph_captures_what_nccl_does_by_itself():
    def program(comm, cuda):
        stream = cuda.new_stream()
        with cuda.on(stream):
            array = cuda.from_host(np.full(3, comm.rank, np.float32))
            out = cuda.from_host(np.zeros(3, np.float32))
            bits = cuda.from_host(np.zeros(3, np.uint32))
            comm.all_reduce(array, out=out)
            stream.begin_capture()
            comm.all_reduce(array, out=out)
            with pytest.raises(RuntimeError, match="a graph can capture"):
                comm.all_reduce(array, "max", out=out)
            with pytest.raises(RuntimeError, match=r"op='bitwise_or'.* of uint32 needs temporary"):
                comm.all_reduce(bits, "bitwise_or", out=bits)
            with pytest.raises(RuntimeError, match="a graph can capture"):
                comm.all_reduce(array, out=out, algorithm="ring")
            graphs = [stream.end_capture()]
            stream.begin_capture()
            handle = comm.all_reduce_async(array, out=out)
            graphs.append(stream.end_capture())
            assert handle.done()
            assert handle.wait() is out
            for graph in graphs:
                for number in range(3):
                    array[...] = cuda.from_host(np.full(3, number + comm.rank, np.float32))
                    graph.launch(stream)
                    same(out, np.full(3, 2 * number + 1, np.float32))

    run(2, program, backend="nccl")


def test_an_asynchronous_call_beside_a_capture_is_no_part_of_it():
    """Though the stream that is captured made such calls before."""

    def program(comm, cuda):
        first, second = cuda.new_stream(), cuda.new_stream()
        array = cuda.from_host(np.full(3, comm.rank + 1, np.float32))
        out = cuda.from_host(np.zeros(3, np.float32))
        comm.all_reduce(array, out=out)
        with cuda.on(first):
            comm.all_reduce_async(array, out=out).wait()
            first.begin_capture()
        with cuda.on(second):
            handle = comm.all_reduce_async(array, "mean", out=out)
        first.end_capture()
        handle.wait()
        same(out, np.full(3, 1.5, np.float32))

    run(2, program, backend="nccl")


def test_a_schedule_that_is_dropped_leaves_its_memory_to_calls_after_it(monkeypatch):
    """Its memory was first used on another stream than that of the last call."""
    monkeypatch.setattr(executor, "_PLANS_KEPT", 1)

    def program(comm, cuda):
        first, second = cuda.new_stream(), cuda.new_stream()

        def made(count):
            return cuda.from_host(np.full(count, comm.rank + 1, np.float32))

        def reduce(array):
            comm.all_reduce(array, out=array, algorithm="ring")

        with cuda.on(first):
            reduce(made(64))
            first.synchronize()
        with cuda.on(second):
            array, other = made(64), made(6)
            cuda.slow(second, 0.5)
            reduce(array)
            reduce(other)
        gc.collect()
        with cuda.on(first):
            # They take the memory, if it is free.
            new = [cuda.from_host(np.full(32, -7, np.float32)) for _ in range(3)]
            second.synchronize()
            for each in new:
                same(each, np.full(32, -7, np.float32))
        with cuda.on(second):
            same(array, np.full(64, 3, np.float32))

    run(2, program, backend="nccl")


def test_what_a_graph_uses_is_held():
    def program(comm, cuda):
        stream = cuda.new_stream()
        with cuda.on(stream):
            out = comm.all_reduce(cuda.from_host(np.ones(3)))
            array = cuda.from_host(np.full(3, comm.rank, np.float64))
            stream.begin_capture()
            comm.all_reduce(array, out=out)
            del array
            graph = stream.end_capture()
            cuda.from_host(np.full(3, 7.0))  # which takes the memory, if it is free
            graph.launch(stream)
            same(out, np.ones(3))

    run(2, program, backend="nccl")
