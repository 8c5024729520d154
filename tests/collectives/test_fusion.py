"""Tensor fusion: a fixed plan, few messages, no mixed dtypes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import (
    Communicator,
    DtypeMismatchError,
    Fusion,
    OpMismatchError,
    ShapeMismatchError,
)
from collectives.reductions.buckets import DEFAULT_BUCKET_BYTES, make_buckets
from collectives.transports.local import LocalTransport, run
from tests.collectives.oracle import DTYPES, reduced, value

KINDS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.sampled_from([np.dtype(name) for name in ("float32", "int8", "float64")]),
    ),
    max_size=30,
)


@given(kinds=KINDS, bucket_bytes=st.integers(1, 500))
def test_every_array_has_its_place_and_no_bucket_is_too_large(kinds, bucket_bytes):
    buckets = make_buckets(tuple(kinds), bucket_bytes)
    placed = sorted(slot.index for bucket in buckets for slot in bucket.slots)
    assert placed == list(range(len(kinds)))
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            shape, dtype = kinds[slot.index]
            assert (slot.shape, bucket.dtype) == (shape, dtype)
            assert (slot.start, slot.stop) == (end, end + int(np.prod(shape)))
            end = slot.stop
        assert bucket.length == end
        assert end * bucket.dtype.itemsize <= bucket_bytes or len(bucket.slots) == 1


def test_the_default_is_a_few_buckets():
    assert DEFAULT_BUCKET_BYTES == 25 << 20
    kinds = (((1000,), np.dtype(np.float32)),) * 1000
    assert len(make_buckets(kinds, DEFAULT_BUCKET_BYTES)) == 1


class CountingTransport(LocalTransport):
    sent = 0

    def exchange(self, sends, receives):
        self.sent += len(sends)
        super().exchange(sends, receives)


def test_a_thousand_small_tensors_cost_a_handful_of_messages():
    def one_rank(transport):
        transport.__class__ = CountingTransport
        comm = Communicator(transport)
        arrays = [value(comm.rank, 10 + index % 3) for index in range(1000)]
        before = transport.sent
        results = comm.all_reduce_many(arrays)
        for index, result in enumerate(results):
            ranks = [value(rank, 10 + index % 3) for rank in range(comm.size)]
            np.testing.assert_array_equal(result, reduced("sum", ranks))
        return transport.sent - before

    assert all(0 < sent <= 6 for sent in run(4, one_rank))


@pytest.mark.mpi
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("bucket_bytes", [None, 1, 64, 1000])
def test_all_reduce_many_of_mixed_dtypes_and_shapes(comm, op, bucket_bytes):
    dtypes = [dtype for dtype in DTYPES if dtype.kind != "c" or op != "max"]

    def arrays(rank):
        return [
            value(rank + index, (index % 4, index % 3 + 1), dtypes[index % len(dtypes)])
            for index in range(40)
        ]

    everybody = [arrays(rank) for rank in range(comm.size)]
    results = comm.all_reduce_many(arrays(comm.rank), op, bucket_bytes=bucket_bytes)
    for result, *each in zip(results, *everybody, strict=True):
        expected = reduced(op, each)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)


@pytest.mark.mpi
def test_into_given_outputs(comm):
    arrays = [value(comm.rank, length) for length in (3, 0, 500)]
    outs = [np.empty(3), np.empty(0), np.empty(1000)[::2]]
    results = comm.all_reduce_many(arrays, out=outs)
    for result, out, length in zip(results, outs, (3, 0, 500), strict=True):
        assert result is out
        expected = reduced("sum", [value(rank, length) for rank in range(comm.size)])
        np.testing.assert_array_equal(out, expected)
    comm.all_reduce_many(arrays, out=arrays)
    np.testing.assert_array_equal(arrays[2], outs[2])
    assert comm.all_reduce_many([]) == []


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize(
    ("odd_call", "error"),
    [
        (lambda arrays: (arrays, "max"), OpMismatchError),
        (lambda arrays: (arrays[:-1], "sum"), ShapeMismatchError),
        (lambda arrays: ([arrays[0].reshape(1, -1), *arrays[1:]], "sum"), ShapeMismatchError),
        (lambda arrays: ([arrays[0].astype("f4"), *arrays[1:]], "sum"), DtypeMismatchError),
    ],
    ids=["op", "number", "shape", "dtype"],
)
def test_ranks_that_differ_raise_alike_and_the_next_call_works(comm, odd_call, error):
    arrays = [value(comm.rank, length) for length in (3, 4, 500)]
    call, op = odd_call(arrays) if comm.rank == comm.size - 1 else (arrays, "sum")
    with pytest.raises(error, match=r"rank 0: all_reduce_many\(sum, ") as caught:
        comm.all_reduce_many(call, op)
    assert len(caught.value.calls) == comm.size
    assert len(set(comm.all_gather_object(str(caught.value)))) == 1
    results = comm.all_reduce_many(arrays)
    expected = reduced("sum", [value(rank, 500) for rank in range(comm.size)])
    np.testing.assert_array_equal(results[2], expected)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_different_dtypes_are_refused_though_their_means_have_the_same(comm):
    arrays = [value(comm.rank, 5, "u8" if comm.rank == 1 else "i1") for _ in range(3)]
    with pytest.raises(DtypeMismatchError, match=r"rank 1: all_reduce_many\(mean, 3×uint64"):
        comm.all_reduce_many(arrays, "mean")


@pytest.mark.mpi
def test_lists_that_can_be_read_once(comm):
    outs = [np.empty(3), np.empty(4)]
    arrays = [value(comm.rank, length) for length in (3, 4)]
    expected = [
        reduced("sum", [value(rank, length) for rank in range(comm.size)]) for length in (3, 4)
    ]
    results = comm.all_reduce_many(iter(arrays), out=iter(outs))
    for result, out, each in zip(results, outs, expected, strict=True):
        assert result is out
        np.testing.assert_array_equal(out, each)
    received = comm.all_to_all(np.full(2, comm.rank) for _ in range(comm.size))
    assert [each.tolist() for each in received] == [[rank] * 2 for rank in range(comm.size)]
    fusion = Fusion(comm, iter(arrays))
    for view, array in zip(fusion.views, arrays, strict=True):
        view[...] = array
    for result, each in zip(fusion.all_reduce(), expected, strict=True):
        np.testing.assert_array_equal(result, each)


@pytest.mark.mpi
@pytest.mark.parametrize("bucket_bytes", [None, 1])
def test_outputs_that_are_other_arrays_inputs(comm, bucket_bytes):
    first, second = value(comm.rank, 3), value(comm.rank + 4, 3)
    comm.all_reduce_many([first, second], out=[second, first], bucket_bytes=bucket_bytes)
    ranks = range(comm.size)
    np.testing.assert_array_equal(second, reduced("sum", [value(rank, 3) for rank in ranks]))
    np.testing.assert_array_equal(first, reduced("sum", [value(rank + 4, 3) for rank in ranks]))


@pytest.mark.mpi
def test_the_same_inputs_give_the_same_bits(comm):
    generator = np.random.default_rng(comm.rank)
    arrays = [generator.standard_normal(100 + index).astype(np.float32) for index in range(50)]
    first = [result.tobytes() for result in comm.all_reduce_many(arrays)]
    for _ in range(3):
        assert [result.tobytes() for result in comm.all_reduce_many(arrays)] == first
    assert len(set(comm.all_gather_object(tuple(first)))) == 1
