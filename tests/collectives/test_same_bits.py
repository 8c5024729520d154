"""Every rank gets the same bits, including NaNs, unless MPI's own reduction ran."""

import hashlib
import itertools

import ml_dtypes
import numpy as np
import pytest

from collectives import Communicator
from collectives.algorithms import names
from collectives.reductions.reduction import ReduceOp, convert, reduction_for
from tests.collectives.oracle import defined

FLOATS = [np.dtype(name) for name in ("f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16)]
OURS = ["staged", "single_copy", "shared", "ring", "doubling", "rabenseifner", "circulant"]
# One number, a few; and for one dtype one more than a block and a buffer hold.
LENGTHS = [1, 67]
ONE_BEYOND = 131_073


def nans(seed, length, dtype):
    """NaNs of all signs and payloads, mixed with numbers and infinities."""
    chance = np.random.default_rng(seed)
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    length *= dtype.itemsize // part.itemsize
    quiet = np.array(np.nan, part).view(f"u{part.itemsize}")
    sign = np.array(-1, part).view(quiet.dtype) & ~np.array(1, part).view(quiet.dtype)
    payloads = chance.integers(1, 60, length).astype(quiet.dtype)
    made = (quiet | payloads | sign * chance.integers(0, 2, length).astype(quiet.dtype)).view(part)
    numbers = chance.choice([1.5, -0.0, np.inf, -np.inf], length).astype(part)
    few = chance.random(length) < (0.3 if length > 2 else 0)
    return np.where(few, numbers, made).view(dtype)


def one_nan(array):
    """The array with all NaNs replaced by NumPy's."""
    real = array.view(f"f{array.itemsize // 2}") if array.dtype.kind == "c" else array.copy()
    real = real.astype(np.float64)
    real[np.isnan(real)] = np.nan
    return real


def pairs():
    for dtype, op in itertools.product(FLOATS, ReduceOp):
        if defined(op.value, dtype):
            yield dtype, op


@pytest.mark.parametrize("bound", [True, False])
def test_a_fold_does_not_depend_on_where_it_is_written(bound):
    for (dtype, op), length, seed in itertools.product(pairs(), [1, 2, 33], range(4)):
        first, second = nans(seed, length, dtype), nans(seed + 1, length, dtype)
        found = set()
        for place in range(3):
            pieces = [first.copy(), second.copy(), np.zeros_like(first)]
            out = pieces[place]
            with np.errstate(all="ignore"):
                if bound:
                    reduction_for(op, dtype).bind(*pieces[:2], out)()
                else:
                    reduction_for(op, dtype).fold(*pieces[:2], out)
            found.add(out.tobytes())
        assert len(found) == 1, (dtype, op, length)


def bits(array):
    """The real numbers' bits, all NaNs alike: which of two NaNs a sum keeps is checked above."""
    real = array.view(array.real.dtype)
    return np.where(np.isnan(real), np.array(np.nan, real.dtype), real).tobytes()


def numbers(seed, length, dtype):
    """NaNs, infinities, the largest numbers, and numbers below the normal ones."""
    made = nans(seed, length, dtype)
    part = made.view(f"f{dtype.itemsize // 2}" if dtype.kind == "c" else dtype)
    chance = np.random.default_rng(seed)
    info = ml_dtypes.finfo(part.dtype)
    some = [info.max, info.smallest_subnormal, 3 * info.smallest_subnormal, 1.5, -7.3]
    few = chance.choice(np.array(some, part.dtype), len(part))
    part[:] = np.where(chance.random(len(part)) < 0.2, part, few)
    return made


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_mean_in_blocks_is_the_sum_divided_at_once(ranks):
    for dtype, length, in_place in itertools.product(FLOATS, [1, 67, ONE_BEYOND], [None, 0, 1]):
        pieces = [numbers(rank, length, dtype) for rank in range(ranks)]
        scratch, mean, total = np.empty_like(pieces[0]), reduction_for(ReduceOp.MEAN, dtype), None
        with np.errstate(all="ignore"):
            for piece in pieces:
                total = piece if total is None else total + piece
            real = total.view(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else total
            wide = real.astype(np.float32) if dtype.itemsize == 2 else real
            expected = (wide / wide.dtype.type(ranks)).astype(real.dtype)
            out = np.empty_like(scratch) if in_place is None else pieces[in_place]
            mean.fold_ranks(pieces, out, scratch)
        assert bits(out) == bits(expected), (dtype, length, in_place)


@np.errstate(all="ignore")
@pytest.mark.parametrize("wide", ["f4", "f8"])
def test_halves_are_converted_as_numpy_does_wherever_they_lie(wide):
    """All halves, and numbers next to the middle between two of them; a NaN stays one."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    exact = halves.astype(wide)
    found = np.empty_like(exact)
    convert(halves, found)
    np.testing.assert_array_equal(found, exact)
    middles = exact[:-1] / 2 + exact[1:] / 2
    given = np.concatenate([np.nextafter(middles, each) for each in (-np.inf, middles, np.inf)])
    given = np.concatenate([given, exact, [1e30, -1e30, 1e-30]]).astype(wide)
    narrow = np.empty(len(given), np.float16)
    convert(given, narrow)
    np.testing.assert_array_equal(narrow, given.astype(np.float16))
    for start, length in ((1, 1), (3, 17), (31_700, 1030)):
        part = slice(start, start + length)
        alone = np.empty(length, np.float16)
        convert(given[part], alone)
        assert alone.tobytes() == narrow[part].tobytes()
        apart = np.empty(length, exact.dtype)
        convert(halves[part], apart)
        assert apart.tobytes() == found[part].tobytes()


def test_a_mean_of_a_single_complex_number():
    total = np.array(2 + 6j)
    reduction_for(ReduceOp.MEAN, total.dtype).finish(total, 4)
    assert total == 0.5 + 1.5j


def test_what_needs_no_care_has_no_function_around_it():
    for dtype in (np.dtype("f4"), np.dtype("i8")):
        product = reduction_for(ReduceOp.PRODUCT, dtype)
        assert product.fold is product.plain_fold is np.multiply


def digests(comm, algorithms):
    """Every call's result on this rank, with the output at rank 0's address or elsewhere."""
    found = {}
    calls = [*itertools.product(pairs(), LENGTHS), ((FLOATS[2], ReduceOp.SUM), ONE_BEYOND)]
    calls += [((FLOATS[1], ReduceOp.MEAN), ONE_BEYOND)]
    for (dtype, op), length in calls:
        given = nans(comm.rank, length, dtype)
        there = {None, *names("all_reduce"), *comm._engine.paths("all_reduce", op, dtype)}
        chosen = [algorithm for algorithm in algorithms if algorithm in there]
        for algorithm, in_place in itertools.product(chosen, [0, None]):
            array = given.copy()
            out = array if comm.rank == in_place else None
            result = comm.all_reduce(array, op, out=out, algorithm=algorithm)
            if algorithm in (None, "native"):
                result = one_nan(result)
            digest = hashlib.sha1(result.tobytes()).hexdigest()
            found[dtype.name, op.value, length, algorithm, in_place] = digest
    return found


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("nodes", ["one node", "a node each"])
def test_all_ranks_get_the_same_nans(comm, nodes):
    """Where MPI's own may have run they get NaN, of any bits, at the same indices."""
    from mpi4py import MPI

    node_of = None if nodes == "one node" else list(range(comm.size))
    with Communicator(MPI.COMM_WORLD, deadline=60, node_of=node_of) as group:
        every = comm.all_gather_object(digests(group, [*OURS, "native", None]))
    assert len(every[0]) > 500
    for call in every[0]:
        assert len({each[call] for each in every}) == 1, call
