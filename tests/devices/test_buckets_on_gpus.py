"""What all_reduce_many launches and stores on simulated GPUs, and its capture in graphs."""

import numpy as np
import pytest

from tests.devices import simulated_kernels  # noqa: F401  fills the simulator's kernels
from tests.devices.gpu_worlds import run
from tests.devices.many_arrays import check, contents, kinds_of, on_device

RANKS = [1, 2, 3]


@pytest.mark.parametrize("size", RANKS)
def test_a_call_that_comes_again_launches_twice_for_each_bucket_and_allocates_nothing(size):
    kinds = [((100,), np.dtype(name)) for name in ("f4", "f4", "i4", "i4", "f4", "f4", "i4")]

    def program(comm, cuda):
        arrays = on_device(cuda, contents(comm.rank, kinds))
        outs = [cuda.empty(*kind) for kind in kinds]
        bits = []
        for _ in range(3):
            comm.barrier()
            before, launches = cuda.allocations, len(cuda.launches)
            comm.barrier()
            comm.all_reduce_many(arrays, out=outs, bucket_bytes=900)
            comm.barrier()
            counts = (cuda.allocations - before, (len(cuda.launches) - launches) / comm.size)
            bits.append([out.get().tobytes() for out in outs])
        assert bits[1] == bits[2] == bits[0]
        check(outs, comm.size, kinds)
        return counts

    # Two of float32, one of int32, and an array that is reduced alone.
    assert run(size, program) == [(0, 6)] * size


def test_tables_are_made_anew_for_other_addresses_and_few_are_kept():
    kinds = kinds_of(np.float32)

    def program(comm, cuda):
        kept = []
        for step in range(12):
            arrays = on_device(cuda, contents(comm.rank, kinds, step))
            kept.append(arrays)  # freed memory would be used again, and the table with it
            check(comm.all_reduce_many(arrays, out=arrays), comm.size, kinds, step=step)
        buckets = [
            comm._many_on_gpus._memories[cuda.current_device()]._sets.popitem()[1].buckets[0]
        ]
        assert len(buckets[0]._tables) == 8
        for length in range(1, 12):
            comm.all_reduce_many([cuda.from_host(np.ones(length, np.float32))] * 2)
        assert len(comm._many_on_gpus._memories[cuda.current_device()]._sets) == 4

    run(2, program)


def test_the_room_between_arrays_stays_zero():
    def program(comm, cuda):
        arrays = on_device(cuda, contents(comm.rank, [((3,), np.dtype("f4"))] * 3))
        for op in ("sum", "product", "max", "mean"):
            comm.all_reduce_many(arrays, op)
        for used in comm._many_on_gpus._memories[cuda.current_device()]._sets.values():
            flat = used.buckets[0].flat.get()
            assert flat.size == 12
            assert flat[[0, 4, 8]].all()
            assert not flat[3::4].any()

    run(2, program)


def test_calls_on_several_streams_do_not_disturb_each_other():
    kinds = kinds_of(np.float32)

    def program(comm, cuda):
        streams = [cuda.new_stream() for _ in range(3)]
        calls = []
        for step in range(6):
            stream = streams[step % 3]
            with cuda.on(stream):
                arrays = on_device(cuda, contents(comm.rank, kinds, step))
                # The packed inputs are late, when later calls have been made on other streams.
                cuda.slow(stream, 0.05 * (3 - step % 3))
                calls.append((stream, comm.all_reduce_many(arrays, out=arrays)))
        for step, (stream, results) in enumerate(calls):
            with cuda.on(stream):
                check(results, comm.size, kinds, step=step)

    run(2, program)


def test_buckets_that_are_given_up_are_not_reused_before_the_calls_that_use_them(lags):
    """`lags`: copies are work on streams, for which the host doesn't wait."""
    kinds = kinds_of(np.float32)

    def program(comm, cuda):
        first, second = cuda.new_stream(), cuda.new_stream()
        with cuda.on(first):
            arrays = on_device(cuda, contents(comm.rank, kinds))
            comm.all_reduce_many(arrays)
            cuda.slow(first, 0.3)
            results = comm.all_reduce_many(arrays)
        with cuda.on(second):
            for length in range(1, 6):
                comm.all_reduce_many([cuda.from_host(np.ones(length, np.float32))] * 2)
        with cuda.on(first):
            check(results, comm.size, kinds)

    run(2, program)


# --- graphs --------------------------------------------------------------------------------------


def test_a_graph_reduces_what_was_written_since():
    kinds = kinds_of(np.float32) + kinds_of(np.int64)

    def program(comm, cuda):
        stream = cuda.new_stream()
        with cuda.on(stream):
            arrays = on_device(cuda, contents(comm.rank, kinds))
            outs = [cuda.empty(*kind) for kind in kinds]
            comm.all_reduce_many(arrays, out=outs, bucket_bytes=3000)
            stream.synchronize()
            stream.begin_capture()
            comm.all_reduce_many(arrays, out=outs, bucket_bytes=3000)
            graph = stream.end_capture()
            # As many others as would evict what the graph uses.
            for length in range(1, 12):
                comm.all_reduce_many([cuda.from_host(np.ones(length, np.float32))] * 2)
            for step in (1, 2, 3):
                for array, content in zip(arrays, contents(comm.rank, kinds, step), strict=True):
                    array[...] = cuda.from_host(content)
                graph.launch(stream)
                stream.synchronize()
                check(outs, comm.size, kinds, step=step)
            assert comm._many_on_gpus._memories[cuda.current_device()]._captured
            check(comm.all_reduce_many(arrays), comm.size, kinds, step=3)

    run(2, program)


@pytest.mark.parametrize("warm", ["not at all", "other arrays"])
def test_a_capture_of_what_was_never_called_is_refused(warm):
    def program(comm, cuda):
        stream = cuda.new_stream()
        with cuda.on(stream):
            arrays, others = (on_device(cuda, contents(0, kinds_of("f4"))) for _ in range(2))
            if warm == "other arrays":
                comm.all_reduce_many(others, out=others)
            else:
                comm.all_reduce(others[0])
            stream.synchronize()
            stream.begin_capture()
            with pytest.raises(RuntimeError, match="once before the capture"):
                comm.all_reduce_many(arrays, out=arrays)
            stream.end_capture()
            comm.all_reduce_many(arrays, out=arrays)

    run(2, program)
