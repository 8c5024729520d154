"""Elements that NCCL reduces as others: here its MIN and MAX are NumPy's, of integers."""

import ml_dtypes
import numpy as np
import pytest

from collectives.gpu.conversions import conversion_of
from collectives.reductions.reduction import ReduceOp

FLOATS = [np.float16, np.float32, np.float64]
FLOATS += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
UFUNCS = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}


def numbers(dtype):
    """Every number of 8 and 16 bits, many of the others, infinities, zeros and NaN among them."""
    bits = 8 * dtype.itemsize
    generator = np.random.default_rng(7)
    if bits <= 16:
        patterns = np.arange(1 << bits, dtype=np.uint32)
    else:
        patterns = generator.integers(0, 1 << bits, 100_000, np.uint64, endpoint=False)
    special = np.array([np.nan, -np.nan, 0.0, -0.0, 1.0, -1.0], dtype)
    return np.concatenate([patterns.astype(f"u{dtype.itemsize}").view(dtype), special])


@pytest.mark.parametrize("op", UFUNCS, ids=lambda op: op.value)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def test_min_and_max_of_floats_are_those_of_integers(dtype, op):
    first = numbers(np.dtype(dtype))
    second = np.random.default_rng(8).permutation(first)
    conversion = conversion_of(op, first.dtype)
    assert conversion.dtype.kind == "i"
    found = np.empty_like(first)
    conversion.convert_back(
        UFUNCS[op](conversion.convert(first), conversion.convert(second)), found
    )
    with np.errstate(all="ignore"):
        expected = UFUNCS[op](first, second).astype(np.float64)
        found = found.astype(np.float64)
    assert np.isnan(expected).any()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.int16, np.uint16])
def test_wide_integers_wrap_as_narrow_ones(dtype):
    conversion = conversion_of(ReduceOp.SUM, np.dtype(dtype))
    first = np.arange(1 << 16, dtype=np.uint32).astype(dtype)
    second = np.random.default_rng(9).permutation(first)
    for ufunc in (np.add, np.multiply, np.minimum):
        found = np.empty_like(first)
        conversion.convert_back(ufunc(conversion.convert(first), conversion.convert(second)), found)
        np.testing.assert_array_equal(found, ufunc(first, second))


def test_what_nccl_does_as_it_is_or_not_at_all_is_not_converted():
    assert conversion_of(ReduceOp.SUM, np.dtype(np.float32)) is None
    assert conversion_of(ReduceOp.MAX, np.dtype(np.int32)) is None
    assert conversion_of(ReduceOp.PRODUCT, np.dtype(np.complex64)) is None
