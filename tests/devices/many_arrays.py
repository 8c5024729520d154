"""Many arrays, whose contents depend on the rank, and the required results of their reductions."""

import ml_dtypes
import numpy as np

from collectives.cuda.kernels import PIECE
from tests.collectives.oracle import reduced, value

SHAPES = [(3,), (0,), (2, 3), (), (500,), (4, 1, 5), (2 * PIECE + 7,)]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MIXED = [np.dtype(name) for name in ("f4", "f2", "i4", "?", "c8", "i8", "u1")] + [BFLOAT16]


def kinds_of(dtype):
    return [(shape, np.dtype(dtype)) for shape in SHAPES]


def mixed_kinds():
    return [(shape, dtype) for shape in SHAPES[:6] for dtype in MIXED]


def contents(rank, kinds, step=0):
    return [np.array(value(rank + step + at, *kind)) for at, kind in enumerate(kinds)]


def on_device(cuda, arrays):
    return [cuda.from_host(array) for array in arrays]


def check(results, size, kinds, op="sum", step=0):
    ranks = [contents(rank, kinds, step) for rank in range(size)]
    for result, *each in zip(results, *ranks, strict=True):
        expected = reduced(op, [np.atleast_1d(array) for array in each])
        found = result.get()
        assert (found.dtype, found.shape) == (expected.dtype, each[0].shape)
        np.testing.assert_array_equal(np.atleast_1d(found), expected)
