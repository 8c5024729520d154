"""Collectives of every rank on its GPU's arrays, and their required results.

A program gets the communicator and the GPU: a real one (`real.py`) or, to check the programs
themselves where there is none, the simulated one.
"""

import ml_dtypes
import numpy as np
import pytest

from collectives.arrays.kinds import copied
from collectives.cuda.kernels import lay_out, reals
from collectives.gpu.buckets import BucketMemory
from collectives.reductions.reduction import ReduceOp, reduction_for
from tests.collectives import oracle

FLOAT8S = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
SHAPE = (6, 5)
SLOW_SECONDS = 0.2
LENGTHS = [1, 7, 0, 4096, 4097, 3, 10_000, 16]
# Of the result; MEAN may be a product with the rounded reciprocal of the number of ranks.
TOLERANCES = {1: 0.2, 2: 1e-2, 4: 1e-5}


def host(array):
    """The elements on the host."""
    if isinstance(array, np.ndarray) and not hasattr(array, "cuda"):
        return array
    return array.get()


def check(result, expected):
    """AssertionError where the result isn't as expected."""
    found = host(result)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(found, expected)
        return
    kind = np.complex128 if expected.dtype.kind == "c" else np.float64
    tolerance = TOLERANCES.get(expected.dtype.itemsize, 1e-6)
    wide = found.astype(kind), expected.astype(kind)
    np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance, equal_nan=True)


def reduced(op, inputs):
    """As the oracle; its sums of 8-bit floats are rounded as often as the GPU's."""
    dtype, shape = inputs[0].dtype, inputs[0].shape
    if dtype not in FLOAT8S:
        # In one dimension: the oracle reduces into arrays, not into scalars.
        return oracle.reduced(op, [each.reshape(-1) for each in inputs]).reshape(shape)
    return oracle.reduced(op, [each.astype(np.float32) for each in inputs]).astype(dtype)


def axes(dtype):
    """Axes to join and cut along: axis 1 needs kernels, which CuPy lacks for 8-bit floats."""
    return (0,) if np.dtype(dtype) in FLOAT8S else (0, 1)


def all_reduce(comm, gpu, op, dtype):
    """Out of place, into `out`, in place; of no elements."""
    inputs = oracle.values(comm.size, SHAPE, dtype)
    expected = reduced(op, inputs)
    array = gpu.from_host(inputs[comm.rank])
    check(comm.all_reduce(array, op), expected)
    check(array, inputs[comm.rank])
    out = gpu.from_host(np.zeros(SHAPE, expected.dtype))
    assert comm.all_reduce(array, op, out=out) is out
    check(out, expected)
    nothing = gpu.empty((0, 3), np.dtype(dtype))
    check(comm.all_reduce(nothing, op), np.empty((0, 3), expected.dtype))
    if expected.dtype == dtype:
        assert comm.all_reduce(array, op, out=array) is array
        check(array, expected)


def all_reduce_8_bit_floats(comm, gpu, op, dtype):
    """As `all_reduce`; NCCL has no mean of them."""
    if op == "mean":
        with pytest.raises(TypeError, match="has no mean"):
            comm.all_reduce(gpu.empty(3, dtype), op)
    else:
        all_reduce(comm, gpu, op, dtype)


def strided(comm, gpu, dtype):
    """Non-contiguous arrays: reduced, in place as well, and broadcast."""
    inputs = oracle.values(comm.size, SHAPE, dtype)
    op = "sum" if np.dtype(dtype).kind == "c" else "max"
    expected = reduced(op, inputs)
    whole = gpu.from_host(np.repeat(inputs[comm.rank], 2, axis=1))
    check(comm.all_reduce(whole[:, ::2], op), expected)
    turned = gpu.from_host(inputs[comm.rank]).T
    check(comm.all_reduce(turned, op), np.ascontiguousarray(expected.T))
    part = whole[:, ::2]
    assert comm.all_reduce(part, op, out=part) is part
    check(copied(part), expected)
    comm.broadcast(part, root=comm.size - 1)
    check(copied(part), expected)


def other_reductions(comm, gpu, op, dtype):
    """reduce and reduce_scatter, along both axes."""
    root, inputs = comm.size - 1, oracle.values(comm.size, SHAPE, dtype)
    expected = reduced(op, inputs)
    array = gpu.from_host(inputs[comm.rank])
    result = comm.reduce(array, op, root=root)
    assert (result is None) == (comm.rank != root)
    if result is not None:
        check(result, expected)
    for axis in axes(dtype):
        mine = np.array_split(expected, comm.size, axis=axis)[comm.rank]
        check(comm.reduce_scatter(array, op, axis=axis), np.ascontiguousarray(mine))
    out = gpu.empty(np.array_split(expected, comm.size)[comm.rank].shape, expected.dtype)
    assert comm.reduce_scatter(array, op, out=out) is out
    check(out, np.array_split(expected, comm.size)[comm.rank])


def gathers(comm, gpu, dtype):
    """all_gather and gather, of equal and of different lengths."""
    rank, size, root = comm.rank, comm.size, comm.size - 1
    equal = oracle.values(size, (3, 2), dtype)
    array, whole = gpu.from_host(equal[rank]), np.concatenate(equal)
    check(comm.all_gather(array), whole)
    out = gpu.empty(whole.shape, whole.dtype)
    assert comm.all_gather(array, out=out) is out
    check(out, whole)
    # The ranks' parts: several elements, one, none.
    for axis in axes(dtype):
        shapes = [np.roll([(3, 0, 1)[each % 3], 2], axis) for each in range(size)]
        ragged = [oracle.value(each, tuple(shapes[each]), dtype) for each in range(size)]
        mine, joined = gpu.from_host(ragged[rank]), np.concatenate(ragged, axis=axis)
        check(comm.all_gather(mine, axis=axis), joined)
        gathered = comm.gather(mine, root=root, axis=axis)
        assert (gathered is None) == (rank != root)
        if gathered is not None:
            check(gathered, joined)
            out = gpu.empty(joined.shape, joined.dtype)
        into = out if rank == root else None
        assert comm.gather(mine, root=root, axis=axis, out=into) is into
        if rank == root:
            check(out, joined)
    check(comm.all_gather(gpu.empty((0, 2), np.dtype(dtype))), np.empty((0, 2), dtype))


def other_movements(comm, gpu, dtype):
    """broadcast, scatter and all_to_all."""
    rank, size, root = comm.rank, comm.size, comm.size - 1
    inputs = oracle.values(size, SHAPE, dtype)
    array = gpu.from_host(inputs[rank])
    assert comm.broadcast(array, root=root) is array
    check(array, inputs[root])
    for axis in axes(dtype):
        block = comm.scatter(array if rank == root else None, root=root, axis=axis)
        expected = np.array_split(inputs[root], size, axis=axis)[rank]
        check(block, np.ascontiguousarray(expected))
        out = gpu.empty(expected.shape, expected.dtype)
        given = array if rank == root else None
        assert comm.scatter(given, root=root, axis=axis, out=out) is out
        check(out, np.ascontiguousarray(expected))
    # A different length for each peer, 0 included.
    blocks = [gpu.from_host(oracle.value(rank, (peer, 2), dtype)) for peer in range(size)]
    for peer, block in enumerate(comm.all_to_all(blocks)):
        check(block, oracle.value(peer, (rank, 2), dtype))


def many(comm, gpu, op="sum", dtypes=(np.float32, np.float16, np.int32)):
    """all_reduce_many of mixed shapes and dtypes, new and into `out`."""
    shapes = [(3, 5), (), (0, 2), (7,), (1, 1, 4), (4097,)]
    kinds = [(shape, np.dtype(dtype)) for dtype in dtypes for shape in shapes]
    inputs = [oracle.values(comm.size, shape, dtype) for shape, dtype in kinds]
    expected = [reduced(op, each) for each in inputs]
    arrays = [gpu.from_host(each[comm.rank]) for each in inputs]
    for result, wanted in zip(comm.all_reduce_many(arrays, op), expected, strict=True):
        check(result, wanted)
    outs = [gpu.empty(each.shape, each.dtype) for each in expected]
    results = comm.all_reduce_many(arrays, op, out=outs)
    assert all(result is out for result, out in zip(results, outs, strict=True))
    for out, wanted in zip(outs, expected, strict=True):
        check(out, wanted)


def asynchronous(comm, gpu):
    """Handles, waited for in the order of the calls and in another."""
    inputs = oracle.values(comm.size, SHAPE, np.float32)
    array = gpu.from_host(inputs[comm.rank])
    handles = [comm.all_reduce_async(array), comm.all_gather_async(array)]
    check(handles[1].wait(), np.concatenate(inputs))
    check(handles[0].wait(), oracle.reduced("sum", inputs))
    assert all(handle.done() for handle in handles)


def runs_beside(comm, gpu):
    """What the caller enqueues after an asynchronous call waits for none of it; `wait` does.

    The next blocking call follows it, whatever its stream.
    """
    ones = np.ones(1 << 12, np.float32)
    array, one = gpu.from_host(ones * comm.rank), gpu.from_host(ones)
    later, total = gpu.empty(ones.shape, ones.dtype), comm.size * (comm.size - 1) / 2
    gpu.fold(ReduceOp.SUM, array, one, later)
    comm.all_reduce_many([array, one])
    starts = {
        "all_reduce": lambda: [comm.all_reduce_async(array)],
        "all_reduce_many": lambda: [comm.all_reduce_many_async([gpu.from_host(ones), array])],
        "two calls": lambda: [comm.broadcast_async(one), comm.all_reduce_async(array)],
    }
    for name, start in starts.items():
        gpu.current_stream().synchronize()
        with comm._devices.beside(None):
            gpu.slow(gpu.current_stream(), SLOW_SECONDS)
        handles = start()
        gpu.fold(ReduceOp.SUM, array, one, later)
        gpu.current_stream().synchronize()
        assert not handles[-1].done(), f"{name}: the caller's stream has waited for the call"
        check(later, ones * (comm.rank + 1))
        # In other streams, and before the handle's wait: it shares the bucket with the call.
        with gpu.on(gpu.new_stream()):
            results = comm.all_reduce_many([one, array])
            check(results[0], ones * comm.size)
            check(results[1], ones * total)
        assert handles[-1].done()
        result = handles[-1].wait()
        check(result[1] if isinstance(result, list) else result, ones * total)


def follows_the_stream(comm, gpu, host_waits=False):
    """The call is ordered after earlier work of the caller's stream, and before later work."""
    ones = np.ones(1 << 16, np.float32)
    stream = gpu.new_stream()
    with gpu.on(stream):
        array, one = gpu.from_host(ones * comm.rank), gpu.from_host(ones)
        out, later = gpu.empty(ones.shape, ones.dtype), gpu.empty(ones.shape, ones.dtype)
        comm.all_reduce(array, out=out)
        # Compiled and loaded here: the first launch would make the host wait.
        gpu.fold(ReduceOp.SUM, out, one, later)
        stream.synchronize()
        gpu.slow(stream, SLOW_SECONDS)
        gpu.fold(ReduceOp.SUM, array, one, array)
        comm.all_reduce(array, out=out)
        gpu.fold(ReduceOp.SUM, out, one, later)
        if not host_waits:
            assert not stream.record().done(), "the host has waited for the GPU"
        total = sum(rank + 1 for rank in range(comm.size))
        check(later, ones * (total + 1))


def holds_what_it_uses(comm, gpu):
    """Memory that the caller frees during the call isn't reused."""
    values = np.arange(1 << 16, dtype=np.float32)
    expected = values * comm.size
    streams = [gpu.new_stream(), gpu.new_stream()]
    with gpu.on(streams[0]):
        outs = [gpu.empty(values.shape, values.dtype) for _ in range(4)]
        gpu.slow(streams[0], SLOW_SECONDS)
        for out in outs:
            comm.all_reduce(gpu.from_host(values), out=out)
        results = [comm.all_reduce(gpu.from_host(values)) for _ in range(4)]
    rubbish = []
    for stream in streams:
        with gpu.on(stream):
            rubbish += [gpu.from_host(np.full_like(values, -1)) for _ in range(8)]
    with gpu.on(streams[0]):
        for each in (*outs, *results):
            check(each, expected)


def captured(comm, gpu, many_arrays=False):
    """A graph of the call, run again on new inputs."""
    shapes = [(1000,), (3, 7), (4096,)] if many_arrays else [(1000,)]
    stream = gpu.new_stream()
    with gpu.on(stream):
        arrays = [gpu.from_host(np.zeros(shape, np.float32)) for shape in shapes]
        outs = [gpu.from_host(np.zeros(shape, np.float32)) for shape in shapes]

        def call():
            if many_arrays:
                comm.all_reduce_many(arrays, out=outs)
            else:
                comm.all_reduce(arrays[0], out=outs[0])

        call()  # allocations of the first call aren't part of the graph
        stream.synchronize()
        replay = gpu.capture(stream, call)
        for number in range(3):
            inputs = [oracle.values(comm.size, shape, np.float32, 5 + number) for shape in shapes]
            for array, each in zip(arrays, inputs, strict=True):
                array[...] = gpu.from_host(each[comm.rank])
            replay()
            for out, each in zip(outs, inputs, strict=True):
                check(out, oracle.reduced("sum", each))
        # Without the graph calls still work.
        call()
        check(outs[0], oracle.reduced("sum", inputs[0]))


def packed(gpu, op, dtype, aligned):
    """Arrays in a bucket, and out of it again, where MEAN casts integers on the way in."""
    folded, skipped = reduction_for(op, dtype, on_gpu=True).dtype, 0 if aligned else 1
    values = [oracle.value(number, (length,), dtype) for number, length in enumerate(LENGTHS)]
    arrays = [gpu.from_host(np.append(values[0][:skipped], each))[skipped:] for each in values]
    outs = [gpu.empty(length + skipped, folded)[skipped:] for length in LENGTHS]
    memory = BucketMemory(gpu)
    made = memory.set_for(tuple(((length,), dtype) for length in LENGTHS), 64 << 20, op)
    (bucket,) = made.buckets
    with memory.turn():
        bucket.pack(bucket.table([arrays[index] for index in bucket.indices]))
        bucket.unpack(bucket.table([outs[index] for index in bucket.indices]))
    factor = reals(folded)
    lengths = [LENGTHS[index] * factor for index in bucket.indices]
    starts, length = lay_out(lengths, folded.itemsize // factor)
    expected = np.zeros(length // factor, folded)
    for index, start in zip(bucket.indices, starts // factor, strict=True):
        expected[start : start + LENGTHS[index]] = values[index].astype(folded)
        check(outs[index], values[index].astype(folded))
    check(bucket.flat, expected)
