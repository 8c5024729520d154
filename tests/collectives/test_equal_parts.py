"""all_to_all of parts that are alike on all ranks: one array, or lists of equal arrays."""

import numpy as np
import pytest

from collectives.errors import CollectiveMismatchError, DtypeMismatchError, ShapeMismatchError
from tests.collectives.oracle import case, value

pytestmark = pytest.mark.mpi

# Rows of a part: none, beside the arrival, the most there of three ranks and of two, through a
# stage, more than a stage.
LENGTHS = [0, 1, 700, 4096, 8192, 8193, 30_001, 150_001]


def sent(rank, size, length, dtype=np.float32):
    return value(rank, (size * length, 2), dtype)


def received(comm, length, dtype=np.float32):
    parts = [np.split(sent(rank, comm.size, length, dtype), comm.size) for rank in range(comm.size)]
    return np.concatenate([each[comm.rank] for each in parts])


def test_one_array(comm):
    for length in LENGTHS:
        array, expected = sent(comm.rank, comm.size, length), received(comm, length)
        for turn in range(3):
            with case("length", length, "turn", turn):
                result = comm.all_to_all(array)
                assert type(result) is np.ndarray
                np.testing.assert_array_equal(result, expected)
                out = np.full_like(array, -1)
                assert comm.all_to_all(array, out=out) is out
                np.testing.assert_array_equal(out, expected)
                np.testing.assert_array_equal(array, sent(comm.rank, comm.size, length))
        comm.all_to_all(array, out=array)
        np.testing.assert_array_equal(array, expected)


def test_lists_of_equal_arrays_keep_their_kind(comm):
    for length in LENGTHS[:-1]:
        parts = [part[:, 0] for part in np.split(sent(comm.rank, comm.size, length), comm.size)]
        expected = np.split(received(comm, length), comm.size)
        for result, wanted in zip(comm.all_to_all(parts), expected, strict=True):
            np.testing.assert_array_equal(result, wanted[:, 0])
    scalars = comm.all_to_all([np.array(10 * comm.rank + peer) for peer in range(comm.size)])
    assert [each.shape for each in scalars] == [()] * comm.size
    assert [int(each) for each in scalars] == [10 * peer + comm.rank for peer in range(comm.size)]
    # Of another kind than the first rank's.
    whole = comm.all_to_all([comm.rank + (0.5 if comm.rank == 0 else 0)] * comm.size)
    assert [(each.shape, float(each)) for each in whole] == [
        ((), peer + (0.5 if peer == 0 else 0)) for peer in range(comm.size)
    ]


def test_arrays_of_other_layouts(comm):
    size = comm.size
    for dtype, rows in (("i1", 2), ("c16", 2), (">f4", 2), (">f4", 20_000), ("?", 2)):
        wide = np.zeros((2 * rows * size, 2, 3), dtype)
        wide[::2] = sent(comm.rank, size, rows, dtype)[:, :, None]
        with case("dtype", dtype, "rows", rows):
            result = comm.all_to_all(wide[::2])
            expected = received(comm, rows, dtype)[:, :, None].repeat(3, 2)
            assert result.dtype == wide.dtype
            np.testing.assert_array_equal(result, expected)
            listed = comm.all_to_all(np.split(wide[::2], size))
            assert listed[0].dtype == wide.dtype
            np.testing.assert_array_equal(np.concatenate(listed), expected)
            strided = np.zeros((2 * size, 6), dtype)[:, ::3]
            given = np.ascontiguousarray(sent(comm.rank, size, 2, dtype).astype(dtype))
            # On one rank alone an array that goes as it is.
            for out in (strided, strided if comm.rank else np.empty_like(given)):
                assert comm.all_to_all(given, out=out) is out
                np.testing.assert_array_equal(out, received(comm, 2, dtype))


def test_ranks_may_differ_in_every_call(comm):
    """What is not alike on all ranks arrives nevertheless, whether other ranks' parts are alike."""
    size, rank = comm.size, comm.rank
    for turn in range(6):
        if (rank + turn) % 3 == 0:
            parts = [np.full(peer + turn + 2, 1.0 * rank) for peer in range(size)]
        elif (rank + turn) % 3 == 1:
            parts = [np.full((turn + 1, 2), 1.0 * rank)] * size
        else:
            parts = [np.full(50_000, rank, np.int32)] * size
        for peer, each in enumerate(comm.all_to_all(parts)):
            assert each.reshape(-1)[0] == peer
            kinds = {0: (rank + turn + 2,), 1: (turn + 1, 2), 2: (50_000,)}
            assert each.shape == kinds[(peer + turn) % 3]


def test_one_array_and_a_list_of_its_parts_are_the_same_call(comm):
    array = sent(comm.rank, comm.size, 30)
    parts = array if comm.rank == 0 else np.split(array, comm.size)
    for _ in range(2):
        got = comm.all_to_all(parts)
        np.testing.assert_array_equal(
            np.concatenate(list(np.split(got, comm.size)))
            if comm.rank == 0
            else np.concatenate(got),
            received(comm, 30),
        )


@pytest.mark.parametrize("path", ["pairwise", None])
def test_an_array_for_which_others_send_other_parts(comm, path):
    """Its rank raises; the other ranks, which send lists, receive the parts; then all go on."""
    if comm.size == 1:
        return
    for error, wrong in ((ShapeMismatchError, np.ones(3)), (DtypeMismatchError, np.ones(2, "i8"))):
        if comm.rank == 0:
            with pytest.raises(error, match=r"rank 1 sent \w+\[[23]\].*parts of float64"):
                comm.all_to_all(np.ones(2 * comm.size), algorithm=path)
        else:
            received = comm.all_to_all([wrong] * comm.size, algorithm=path)
            assert received[0].tolist() == [1.0, 1.0]
        assert comm.all_reduce(1) == comm.size


def test_what_one_rank_refuses_alone(comm):
    size = comm.size
    if size == 1:
        return
    with pytest.raises(ValueError, match=f"first axis must be divisible by {size}"):
        comm.all_to_all(np.ones(size + 1))
    with pytest.raises(ValueError, match=r"shape \(\).*first axis"):
        comm.all_to_all(np.array(1.0))
    with pytest.raises(ValueError, match="out has shape"):
        comm.all_to_all(np.ones(size), out=np.ones(2 * size))
    with pytest.raises(TypeError, match="out has dtype"):
        comm.all_to_all(np.ones(size), out=np.ones(size, "f4"))
    with pytest.raises(ValueError, match="arrays must be one array"):
        comm.all_to_all([np.ones(1)] * size, out=np.ones(size))
    with pytest.raises(TypeError, match="dtype object"):
        comm.all_to_all(np.array([None] * size))
    with pytest.raises(CollectiveMismatchError):
        (comm.barrier if comm.rank else lambda: comm.all_to_all(np.ones(size)))()
    assert comm.all_to_all(np.full(size, comm.rank)).tolist() == list(range(size))


def test_registered_arrays_are_read_and_written_in_place(comm):
    size, length = comm.size, 40_000
    with comm.split(0) as own:
        ordinary, expected = sent(comm.rank, size, length), received(comm, length)
        for source, target in ((True, True), (True, False), (False, True)):
            given = own.empty(ordinary.shape) if source else ordinary
            given[...] = ordinary
            out = own.zeros(ordinary.shape) if target else np.zeros_like(ordinary)
            with case("source", source, "target", target):
                own.all_to_all(given, out=out)
                np.testing.assert_array_equal(out, expected)
                if size > 1 and own.nodes == 1:
                    assert own._engine.path == "direct"
        # Registered on one rank alone.
        mixed = given if comm.rank else ordinary
        np.testing.assert_array_equal(own.all_to_all(mixed), expected)


def test_asynchronous_calls_take_the_same_arguments(comm):
    array = sent(comm.rank, comm.size, 9)
    out = np.empty_like(array)
    assert comm.all_to_all_async(array, out=out).wait() is out
    np.testing.assert_array_equal(out, received(comm, 9))
    np.testing.assert_array_equal(comm.all_to_all_async(array).wait(), received(comm, 9))
