"""Shared memory: every collective through it, on ordinary and registered arrays."""

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import Communicator, MismatchError
from tests.collectives.oracle import DTYPES, PAIRS, case, reduced, value, values

pytestmark = pytest.mark.mpi

# Around the limits between the paths: inside a slot, in slices, over several buffers.
LENGTHS = [1, 1000, 40_000, 300_001, 700_003]


@pytest.fixture(params=[True, False], ids=["registered", "ordinary"])
def make(request, comm):
    """A function that copies an array into this kind of memory."""

    def copy(array):
        array = np.asarray(array)
        if not request.param:
            return array.copy()
        registered = comm.empty(array.shape, array.dtype)
        registered[...] = array
        return registered

    return copy


def nodes_of(size):
    """Maps of `size` ranks to nodes: even, uneven, alone, interleaved."""
    maps = {
        "halves": [rank * 2 // size for rank in range(size)],
        "one apart": [0] * (size - 1) + [1],
        "every second": [rank % 2 for rank in range(size)],
        "each alone": list(range(size)),
    }
    return {name: node_of for name, node_of in maps.items() if len(set(node_of)) > 1 or size == 1}


@pytest.mark.parametrize("length", LENGTHS)
def test_all_reduce(comm, make, length):
    given = value(comm.rank, length, np.float32)
    expected = reduced("sum", values(comm.size, length, np.float32))
    array, out = make(given), make(np.full(length, -1, np.float32))
    np.testing.assert_array_equal(comm.all_reduce(array), expected)
    assert comm.all_reduce(array, out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(array, given)
    comm.all_reduce(array, out=array)
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("length", [21, 20_011])
def test_all_reduce_of_every_dtype(comm, make, length):
    for op, dtype in PAIRS:
        largest = 2 if op == "product" else 5
        array = make(value(comm.rank, length, dtype, largest))
        expected = reduced(op, values(comm.size, length, dtype, largest))
        with case(op, dtype):
            result = comm.all_reduce(array, op)
            assert result.dtype == expected.dtype
            np.testing.assert_array_equal(result, expected)
            if expected.dtype == dtype:
                comm.all_reduce(array, op, out=array)
                np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("length", [1001, 500_001])
def test_all_ranks_end_with_the_same_bits(comm, make, length):
    numbers = np.random.default_rng(comm.rank).standard_normal(length) * 9
    numbers[3] = np.nan
    for dtype in (each for each in DTYPES if each.name in ("float16", "float32", "bfloat16")):
        array = make(numbers.astype(dtype))
        with case(dtype):
            result = comm.all_reduce(array)
            again = comm.all_reduce(array)
            assert len(set(comm.all_gather_object(result.tobytes()))) == 1
            assert result.tobytes() == again.tobytes()
            comm.all_reduce(array, out=array)
            assert len(set(comm.all_gather_object(array.tobytes()))) == 1


@pytest.mark.parametrize("kind", ["array", "out", "both", "a rank's"])
def test_registered_and_ordinary_arrays_mix(comm, kind):
    """Registration may differ by rank and by array; no rank may hang or read too early."""
    for length in (20_000, 300_001):
        given = value(comm.rank, length, np.float32)
        expected = reduced("sum", values(comm.size, length, np.float32))
        array, out = comm.empty(length), comm.zeros(length)
        mine = kind == "both" or (kind == "a rank's" and comm.rank == 0)
        array = array if mine or kind == "array" else np.empty(length, np.float32)
        out = out if mine or kind == "out" else np.empty(length, np.float32)
        array[:] = given
        comm.all_reduce(array, out=out)
        np.testing.assert_array_equal(out, expected)
        in_place = comm.rank % 2 == 0
        result = comm.all_reduce(array, out=array if in_place else None)
        np.testing.assert_array_equal(result, expected)


def test_slices_of_a_registered_array(comm):
    """Each rank may pass another part of it."""
    whole = comm.zeros((comm.size, 30_000))
    whole[comm.rank] = value(comm.rank, 30_000, np.float32)
    expected = reduced("sum", values(comm.size, 30_000, np.float32))
    np.testing.assert_array_equal(comm.all_reduce(whole[comm.rank]), expected)
    comm.all_reduce(whole[comm.rank], out=whole[(comm.rank + 1) % comm.size])
    np.testing.assert_array_equal(whole[(comm.rank + 1) % comm.size], expected)


def test_an_output_that_overlaps_the_input(comm):
    array = comm.empty(100_001)
    content = value(comm.rank, 100_001, np.float32)
    array[:] = content
    comm.all_reduce(array[:-1], out=array[1:])
    expected = reduced("sum", values(comm.size, 100_001, np.float32))
    np.testing.assert_array_equal(array[1:], expected[:-1])
    assert array[0] == content[0]


@pytest.mark.parametrize("length", LENGTHS)
def test_movements(comm, make, length):
    size = comm.size
    parts = [value(rank, length + rank % 2, np.int32) for rank in range(size)]
    joined = np.concatenate(parts)
    array = make(np.resize(parts[comm.rank], length + 1))[: len(parts[comm.rank])]
    np.testing.assert_array_equal(comm.all_gather(array), joined)
    out = make(np.zeros(len(joined), np.int32))
    assert comm.all_gather(array, out=out) is out
    np.testing.assert_array_equal(out, joined)
    for root in range(size):
        block = make(value(comm.rank, length, np.int32))
        assert comm.broadcast(block, root=root) is block
        np.testing.assert_array_equal(block, value(root, length, np.int32))
    blocks = comm.all_to_all([array[: length // (peer + 1)] for peer in range(size)])
    for peer, block in enumerate(blocks):
        np.testing.assert_array_equal(block, parts[peer][: length // (comm.rank + 1)])


@pytest.mark.ranks(2, 3, 4)
def test_few_rows_beside_many(comm, make):
    """Those of one rank lie beside its arrival, those of another don't fit there."""
    lengths = [5 + rank if rank else 70_001 for rank in range(comm.size)]
    parts = [value(rank, length, np.int32) for rank, length in enumerate(lengths)]
    joined = np.concatenate(parts)
    array = make(np.resize(parts[comm.rank], 70_001))[: lengths[comm.rank]]
    for _ in range(3):
        np.testing.assert_array_equal(comm.all_gather(array), joined)
        few = np.concatenate([part[:5] for part in parts])
        np.testing.assert_array_equal(comm.all_gather(array[:5]), few)


@pytest.mark.parametrize("length", LENGTHS)
def test_reductions_to_one_rank(comm, make, length):
    expected = reduced("max", values(comm.size, length))
    array = make(value(comm.rank, length))
    mine = np.array_split(expected, comm.size)[comm.rank]
    np.testing.assert_array_equal(comm.reduce_scatter(array, "max"), mine)
    out = make(np.zeros(length))[: len(mine)]
    assert comm.reduce_scatter(array, "max", out=out) is out
    np.testing.assert_array_equal(out, mine)
    for root in range(comm.size):
        out = make(np.zeros(length))
        result = comm.reduce(array, "max", root=root, out=out)
        assert (result is out) if comm.rank == root else (result is None)
        np.testing.assert_array_equal(result, expected if comm.rank == root else None)
    out = array if comm.rank == 0 else None
    result = comm.reduce(array, "max", out=out)
    np.testing.assert_array_equal(result, expected if comm.rank == 0 else None)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_outputs_along_other_axes(comm, axis):
    shape = (4, 3, 5)
    array = value(comm.rank, shape)
    joined = np.concatenate(values(comm.size, shape), axis)
    out = np.zeros(joined.shape)
    assert comm.all_gather(array, axis=axis, out=out) is out
    np.testing.assert_array_equal(out, joined)
    block = np.array_split(reduced("sum", values(comm.size, shape)), comm.size, axis)[comm.rank]
    out = np.zeros(block.shape)
    assert comm.reduce_scatter(array, axis=axis, out=out) is out
    np.testing.assert_array_equal(out, block)


@pytest.mark.ranks(2, 3)
def test_an_output_of_the_wrong_length_on_one_rank(comm):
    array = value(comm.rank, 6)
    out = np.zeros(6 * comm.size + (comm.rank == 1))
    with pytest.raises(ValueError, match=f"13 rows on rank 1|{6 * comm.size + 1} rows on rank 1"):
        comm.all_gather(array, out=out)
    np.testing.assert_array_equal(comm.all_gather(array), np.concatenate(values(comm.size, 6)))


@settings(max_examples=40)
@given(st.data())
def test_any_length_dtype_and_op(comm, data):
    op, dtype = data.draw(st.sampled_from(PAIRS))
    length = data.draw(st.integers(0, 5000) | st.integers(5000, 400_000))
    registered = data.draw(st.booleans())
    largest = 2 if op == "product" else 5
    given = value(comm.rank, length, dtype, largest)
    array = comm.empty(length, dtype) if registered else np.empty(length, dtype)
    array[:] = given
    expected = reduced(op, values(comm.size, length, dtype, largest))
    np.testing.assert_array_equal(comm.all_reduce(array, op), expected)
    block = np.array_split(expected, comm.size)[comm.rank]
    np.testing.assert_array_equal(comm.reduce_scatter(array, op), block)


def test_registered_arrays_are_valid_as_long_as_they_live(comm):
    part = comm.split(0)
    kept = part.zeros(5000)
    kept[:] = comm.rank
    view = kept[10:20]
    del kept
    others = [part.zeros(5000) for _ in range(50)]
    for each in others:
        each[:] = -1
    np.testing.assert_array_equal(view, comm.rank)
    part.close()
    gc.collect()
    view += 1
    np.testing.assert_array_equal(view, comm.rank + 1)


def test_memory_of_dropped_arrays_is_used_again(comm):
    part = comm.split(0)
    first = part.empty(100_000)
    node = part._engine.node
    if node is None:
        assert comm.size == 1
        return
    del first
    for _ in range(100):
        part.empty(100_000)
    gc.collect()
    windows = len(node.pool._windows)
    assert windows == 1
    part.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("odd", [(7, "float32"), (8, "float64")])
def test_ranks_that_ask_for_different_arrays(comm, odd):
    with pytest.raises(MismatchError) as caught:
        comm.empty(*(odd if comm.rank else (8, "float32")))
    assert caught.value.calls[0] == "empty(float32[8])"
    assert comm.zeros((2, 4)).shape == (2, 4)


@pytest.mark.ranks(2, 3, 5, 8)
@pytest.mark.parametrize("name", nodes_of(4))
def test_all_reduce_between_imitated_nodes(comm, name):
    node_of = nodes_of(comm.size)[name]
    with imitate(node_of) as part:
        for length in (0, 1, 3, 1000, 300_001):
            with case("length", length):
                check_between_nodes(comm, part, node_of, length)


def check_between_nodes(comm, part, node_of, length):
    array = value(comm.rank, length)
    expected = reduced("sum", values(comm.size, length))
    np.testing.assert_array_equal(part.all_reduce(array), expected)
    if max(map(node_of.count, node_of)) > 1:
        result = part.all_reduce(array, algorithm="hierarchical")
        np.testing.assert_array_equal(result, expected)
        registered = part.empty(length, np.float64)
        registered[:] = array
        part.all_reduce(registered, "max", out=registered, algorithm="hierarchical")
        np.testing.assert_array_equal(registered, reduced("max", values(comm.size, length)))
    np.testing.assert_array_equal(array, value(comm.rank, length))


@pytest.mark.ranks(3, 5, 8)
@pytest.mark.parametrize("name", nodes_of(4))
def test_everything_else_between_imitated_nodes(comm, name):
    node_of = nodes_of(comm.size)[name]
    with imitate(node_of) as part:
        array = value(comm.rank, 6)
        np.testing.assert_array_equal(part.all_gather(array), np.concatenate(values(comm.size, 6)))
        np.testing.assert_array_equal(
            part.broadcast(array.copy(), root=comm.size - 1), value(comm.size - 1, 6)
        )
        part.barrier()
        handle = part.all_reduce_async(array)
        np.testing.assert_array_equal(handle.wait(), reduced("sum", values(comm.size, 6)))
        with pytest.raises(MismatchError) as caught:
            part.all_reduce(array[: 5 + (comm.rank == comm.size - 1)])
        assert len(caught.value.calls) == comm.size
        part.barrier()


def imitate(node_of):
    from mpi4py import MPI

    return Communicator(MPI.COMM_WORLD, node_of=node_of, deadline=20)
