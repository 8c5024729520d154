"""`reduce` and `gather` against NumPy on the concatenated values, for any shapes, on threads."""

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.support import on_ranks

DTYPES = [np.bool_, np.int8, np.uint16, np.int32, np.int64, np.float16, np.float32, np.float64]
DTYPES += [np.complex64, ml_dtypes.bfloat16]


@st.composite
def parts(draw, longest=3):
    """An axis, and an array for each rank; lengths along that axis differ."""
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    chance = np.random.default_rng(draw(st.integers(0, 1000)))
    arrays = []
    for length in draw(st.lists(st.integers(0, longest), min_size=1, max_size=5)):
        shape[axis] = length
        # Small integers, so that sums are exact in every dtype and in every order.
        arrays.append(chance.integers(0, 4, shape).astype(dtype))
    return axis, arrays


def result_dtype(op, dtype):
    return np.dtype(np.float64) if op == "mean" and dtype.kind in "biu" else dtype


def exact_sum(array, axes, op):
    """The sum, which is `or` for booleans, unless it is for a mean."""
    if array.dtype.kind == "b" and op == "sum":
        return np.any(array, axis=axes)
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    return array.astype(wide).sum(axis=axes)


def expected_over(joined, axes, op):
    total = exact_sum(joined, axes, op)
    if op == "mean":
        with np.errstate(invalid="ignore", divide="ignore"):
            total = total / np.prod([joined.shape[axis] for axis in axes])
    return np.asarray(total).astype(result_dtype(op, joined.dtype))


def check_all(results, expected):
    for result in results:
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        tolerance = 1e-2 if expected.dtype.itemsize == 2 and expected.dtype.kind in "fV" else 1e-6
        wide = np.complex128 if expected.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(result.astype(wide), expected.astype(wide), rtol=tolerance)
        assert result.tobytes() == results[0].tobytes()


@given(parts(), st.sampled_from(["sum", "mean"]))
def test_reduce_over_one_axis(ranks, op):
    axis, arrays = ranks
    results = on_ranks(
        len(arrays), lambda strategy: strategy.reduce(op, arrays[strategy.communicator.rank], axis)
    )
    check_all(results, expected_over(np.concatenate(arrays, axis), (axis,), op))


@given(parts(), st.sampled_from(["sum", "mean"]), st.data())
def test_reduce_over_several_axes(ranks, op, data):
    axis, arrays = ranks
    others = [each for each in range(arrays[0].ndim) if each != axis % arrays[0].ndim]
    more = data.draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    axes = (axis, *more)
    results = on_ranks(
        len(arrays), lambda strategy: strategy.reduce(op, arrays[strategy.communicator.rank], axes)
    )
    check_all(results, expected_over(np.concatenate(arrays, axis), axes, op))


@given(parts(), st.sampled_from(["sum", "mean"]))
def test_reduce_element_by_element(ranks, op):
    _, arrays = ranks
    alike = [arrays[0] if rank % 2 else arrays[0][..., ::-1] for rank in range(len(arrays))]
    results = on_ranks(
        len(arrays), lambda strategy: strategy.reduce(op, alike[strategy.communicator.rank], None)
    )
    check_all(results, expected_over(np.stack(alike), (0,), op))


@given(parts())
def test_gather(ranks):
    axis, arrays = ranks
    results = on_ranks(
        len(arrays), lambda strategy: strategy.gather(arrays[strategy.communicator.rank], axis)
    )
    check_all(results, np.concatenate(arrays, axis))


@given(st.lists(parts(), min_size=1, max_size=3))
def test_the_arrays_of_a_nest_are_reduced_one_by_one(several):
    size = min(len(arrays) for _, arrays in several)
    columns = [
        [array[(0,) * array.ndim] if array.size else array.dtype.type(1) for array in arrays]
        for _, arrays in several
    ]

    def body(strategy):
        rank = strategy.communicator.rank
        nest = {str(place): [column[rank]] for place, column in enumerate(columns)}
        return strategy.reduce("sum", nest, axis=None)

    for result in on_ranks(size, body):
        for place, column in enumerate(columns):
            expected = expected_over(np.stack(column[:size]), (0,), "sum")
            check_all(result[str(place)], expected)
