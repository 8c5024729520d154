"""One size of one collective: the ranks' inputs, and the expected results.

The values are small integers that every dtype represents exactly, drawn by rank, so that results
are exact and compared without a tolerance. They repeat with a prime period, so that a block at a
wrong position is not correct by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
DType: TypeAlias = np.dtype[Any]

_PERIOD = 251
_FOLDS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}
OPS = tuple(_FOLDS)


@dataclass(frozen=True)
class Problem:
    """The parameters common to all ranks; `count` is the number of elements in the size column."""

    ranks: int
    count: int
    dtype: DType
    op: str = "sum"
    root: int = 0
    tensors: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes in the size column."""
        return self.count * self.dtype.itemsize

    @property
    def block(self) -> int:
        """One rank's share of the elements."""
        return self.count // self.ranks

    def block_of(self, rank: int) -> slice:
        """The elements of a rank's share."""
        return slice(rank * self.block, (rank + 1) * self.block)

    @property
    def result_dtype(self) -> DType:
        """The dtype of a reduction's result: MEAN of integers is float64."""
        averages_integers = self.op == "mean" and self.dtype.kind in "biu"
        return np.dtype(np.float64) if averages_integers else self.dtype

    def values(self, rank: int, count: int) -> Array:
        """A rank's input."""
        return np.resize(self._pattern(rank), count)

    def folded(self, count: int, ranks: int | None = None) -> Array:
        """The reduction of the inputs of all ranks, or of the first `ranks`."""
        ranks = self.ranks if ranks is None else ranks
        patterns = [self._pattern(rank).astype(self.result_dtype) for rank in range(ranks)]
        total = reduce(_FOLDS[self.op], patterns)
        return np.resize(_divided(total, ranks) if self.op == "mean" else total, count)

    def _pattern(self, rank: int) -> Array:
        # Zeros would make nearly every product zero.
        lowest = 1 if self.op == "product" else 0
        drawn = np.random.default_rng(rank).integers(lowest, 3, _PERIOD)
        return (drawn % 2 if self.dtype.kind == "b" else drawn).astype(self.dtype)


def _divided(total: Array, ranks: int) -> Array:
    """The mean, rounded once; 16-bit floats can't represent every number of ranks."""
    wide = total.astype(np.float32) if total.dtype.itemsize == 2 else total
    quotient: Array = wide / np.asarray(ranks, wide.real.dtype)
    return quotient.astype(total.dtype)


def count_wrong(result: Any, expected: Array | None) -> int:
    """Number of elements that differ; `result` may be a list of arrays, which is concatenated."""
    if expected is None:
        return 0
    if isinstance(result, list):
        result = np.concatenate(result)
    if not isinstance(result, np.ndarray) or result.shape != expected.shape:
        return expected.size
    return int(np.count_nonzero(result != expected))
