"""all_reduce_many and Fusion of arrays on simulated GPUs."""

import numpy as np
import pytest

from collectives import (
    DtypeMismatchError,
    Fusion,
    MismatchError,
    OpMismatchError,
    ShapeMismatchError,
)
from tests.collectives.oracle import PAIRS, case
from tests.devices import simulated_kernels  # noqa: F401  fills the simulator's kernels
from tests.devices.gpu_worlds import run, simulated
from tests.devices.many_arrays import check, contents, kinds_of, mixed_kinds, on_device
from tests.slow import slow

RANKS = [1, 2, 3]
BITS = "unsigned int, unsigned int"


# --- the results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, *slow(1, 2)])
def test_as_all_reduce_of_each(size):
    def program(comm, cuda):
        for op, dtype in PAIRS:
            with case(op, dtype):
                compare(comm, on_device(cuda, contents(comm.rank, kinds_of(dtype))), op)

    def compare(comm, arrays, op):
        results = comm.all_reduce_many(arrays, op)
        for result, array in zip(results, arrays, strict=True):
            each = comm.all_reduce(array, op)
            assert (result.dtype, result.shape) == (each.dtype, each.shape)
            assert result.get().tobytes() == each.get().tobytes()

    run(size, program)


@pytest.mark.parametrize("backend", ["auto", "nccl", "mpi"])
@pytest.mark.parametrize("bucket_bytes", [None, 1, 100, 3000])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_mixed_dtypes_come_in_their_order(backend, bucket_bytes, op):
    kinds = mixed_kinds()

    def program(comm, cuda):
        arrays = on_device(cuda, contents(comm.rank, kinds))
        check(comm.all_reduce_many(arrays, op, bucket_bytes=bucket_bytes), comm.size, kinds, op)

    run(2, program, backend=backend)


def test_ranks_that_share_a_gpu():
    def program(comm, cuda):
        arrays = on_device(cuda, contents(comm.rank, mixed_kinds()))
        for op in ("sum", "mean"):
            check(comm.all_reduce_many(arrays, op), comm.size, mixed_kinds(), op)

    run(3, program, device=lambda rank: 0)


@pytest.mark.parametrize("size", [3, *slow(1, 2)])
def test_a_thousand_tensors_travel_in_one_bucket(size):
    kinds = [((10 + index % 3,), np.dtype(np.float32)) for index in range(1000)]

    def program(comm, cuda):
        arrays = on_device(cuda, contents(comm.rank, kinds))
        check(comm.all_reduce_many(arrays), comm.size, kinds)

    with simulated() as gpus:
        run(size, program, gpus=gpus[0])
        launched = [(f"{kernel}<{BITS}>", 1000) for kernel in ("pack", "unpack")]
        assert sorted(gpus[0].launches) == sorted(launched * size)
        calls = [name for name, _ in gpus[1].calls[0]]
        assert calls.count("all_reduce") == (size > 1)


@pytest.mark.parametrize("bucket_bytes", [None, 1, 24])
@pytest.mark.parametrize("form", ["in place", "swapped", "shifted", "strided"])
def test_outputs_that_are_inputs(form, bucket_bytes):
    kinds = [((8,), np.dtype(np.float32))] * 2

    def program(comm, cuda):
        whole = cuda.empty((20, 2), np.dtype(np.float32))
        line = whole[:, 0] if form == "strided" else whole.reshape(-1)
        given = [line[:8], line[8:16]]
        outs = {"in place": given, "swapped": given[::-1]}
        out = outs.get(form, [line[4:12], line[12:20]])
        for step in range(3):
            for array, content in zip(given, contents(comm.rank, kinds, step), strict=True):
                array[...] = cuda.from_host(content)
            results = comm.all_reduce_many(given, out=out, bucket_bytes=bucket_bytes)
            assert all(result is each for result, each in zip(results, out, strict=True))
            check(results, comm.size, kinds, step=step)

    run(3, program)


def test_outputs_of_a_bucket_in_an_input_that_goes_alone():
    kinds = [((length,), np.dtype(np.float32)) for length in (4, 4, 20)]

    def program(comm, cuda):
        arrays = on_device(cuda, contents(comm.rank, kinds))
        outs = [arrays[2][:4], arrays[2][8:12], cuda.empty(*kinds[2])]
        results = comm.all_reduce_many(arrays, out=outs, bucket_bytes=40)
        check(results, comm.size, kinds)

    run(2, program)


def test_arrays_of_another_library():
    kinds = kinds_of(np.float32)

    def program(comm, cuda):
        arrays = [cuda.foreign(array) for array in contents(comm.rank, kinds)]
        outs = [cuda.foreign(np.zeros(kind[0], np.float32)) for kind in kinds]
        results = comm.all_reduce_many(arrays)
        assert all(
            result.stream is each.stream for result, each in zip(results, arrays, strict=True)
        )
        check(results, comm.size, kinds)
        assert comm.all_reduce_many(arrays, out=outs) == outs
        check(outs, comm.size, kinds)

    run(2, program)


def test_a_handle_of_many_waits_for_the_gpu():
    kinds = kinds_of(np.float32)

    def program(comm, cuda):
        arrays = on_device(cuda, contents(comm.rank, kinds))
        cuda.slow(cuda.current_stream(), 0.2)
        handle = comm.all_reduce_many_async(arrays)
        assert not handle.done()
        check(handle.wait(), comm.size, kinds)
        with pytest.raises(ShapeMismatchError):
            comm.all_reduce_many_async(arrays[comm.rank :]).wait()
        check(comm.all_reduce_many(arrays), comm.size, kinds)

    run(2, program, backend="nccl")


def test_no_arrays_and_empty_arrays():
    def program(comm, cuda):
        assert comm.all_reduce_many([]) == []
        empty = [cuda.empty((0, 3), np.dtype("f4")) for _ in range(3)]
        assert [result.shape for result in comm.all_reduce_many(empty)] == [(0, 3)] * 3
        return len(cuda.launches)

    assert run(2, program) == [0, 0]


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "mpi"])
@pytest.mark.parametrize(
    ("odd", "error"),
    [
        (lambda arrays: (arrays, "max"), OpMismatchError),
        (lambda arrays: (arrays[:-1], "sum"), ShapeMismatchError),
        (lambda arrays: ([arrays[0].reshape(1, -1), *arrays[1:]], "sum"), ShapeMismatchError),
        (lambda arrays: ([arrays[0].astype("f8"), *arrays[1:]], "sum"), DtypeMismatchError),
        (lambda arrays: ([array.get() for array in arrays], "sum"), MismatchError),
    ],
    ids=["op", "number", "shape", "dtype", "place"],
)
def test_ranks_that_differ_raise_alike_and_the_next_call_works(odd, error, backend):
    kinds = [((length,), np.dtype(np.float32)) for length in (3, 4, 500)]

    def program(comm, cuda):
        arrays = on_device(cuda, contents(comm.rank, kinds))
        call, op = odd(arrays) if comm.rank == comm.size - 1 else (arrays, "sum")
        with pytest.raises(error, match=r"rank 0: all_reduce_many\(sum, ") as caught:
            comm.all_reduce_many(call, op)
        assert type(caught.value) is error
        check(comm.all_reduce_many(arrays), comm.size, kinds)

    run(3, program, backend=backend)


def test_integers_that_differ_are_told_apart_where_they_are_reduced_in_one_dtype():
    def program(comm, cuda):
        dtype = np.int32 if comm.rank else np.int64
        with pytest.raises(DtypeMismatchError):
            comm.all_reduce_many([cuda.empty(3, np.dtype(dtype)) for _ in range(2)], "mean")

    run(2, program)


def test_what_one_rank_can_see_to_be_wrong():
    def program(comm, cuda):
        array, host = cuda.from_host(np.ones(3, np.float32)), np.ones(3, np.float32)
        with pytest.raises(TypeError, match=r"arrays\[1\] lies on the CPU"):
            comm.all_reduce_many([array, host, array])
        with pytest.raises(TypeError, match="on a GPU"):
            comm.all_reduce_many([host, array])
        with pytest.raises(TypeError, match="lies on the CPU"):
            comm.all_reduce_many([array], out=[host])
        with pytest.raises(ValueError, match="out has 1 entries"):
            comm.all_reduce_many([array, array], out=[array])
        with pytest.raises(ValueError, match="bucket_bytes"):
            comm.all_reduce_many([array], bucket_bytes=0)
        cuda.use_device(5)
        other = cuda.from_host(np.ones(3))
        cuda.use_device(comm.rank)
        with pytest.raises(TypeError, match=r"arrays\[1\] lies on GPU 5"):
            comm.all_reduce_many([array, other])
        with pytest.raises(TypeError, match="some of the arrays"):
            Fusion(comm, [array, host])

    run(2, program)


# --- arrays in buckets from the start ------------------------------------------------------------


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_views_of_buckets_are_reduced_in_place(backend, size):
    kinds = mixed_kinds()

    def program(comm, cuda):
        like = on_device(cuda, contents(0, kinds)) if backend == "auto" else kinds
        fusion = Fusion(comm, like, bucket_bytes=3000)
        views = fusion.views
        assert not any(view.get().any() for view in views)
        for step, op in enumerate(["sum", "sum", "product"]):
            for view, content in zip(views, contents(comm.rank, kinds, step), strict=True):
                view[...] = cuda.from_host(content)
            results = fusion.all_reduce(op)
            assert all(result is view for result, view in zip(results, views, strict=True))
            check(results, comm.size, kinds, op, step)
        assert not cuda.launches

    run(size, program, backend=backend)


def test_a_fusion_on_a_gpu_does_not_meet_one_on_the_host():
    def program(comm, cuda):
        array = np.ones(3, np.float32)
        with pytest.raises(MismatchError):
            Fusion(comm, [cuda.from_host(array) if comm.rank else array])

    run(2, program)
