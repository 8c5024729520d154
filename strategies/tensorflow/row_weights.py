"""Sums of gradients of means over rows, of which each rank's counts by its rows.

The products with the numbers of rows would be two passes over all gradients, as operations of
TensorFlow's. They are left out where every rank has the usual number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.core.options import ReduceOp
from strategies.core.values import Array
from strategies.replication.replication import Replication
from strategies.tensorflow.result_memory import ResultMemory


class RowWeights:
    """The weighted sums of a strategy's ranks."""

    def __init__(self, replication: Replication, results: ResultMemory) -> None:
        self._replication, self._results = replication, results
        self._usual = 0
        """The most rows of any rank in the first sum: the same on all ranks."""

    def sums(self, arrays: Sequence[Array], count: int, rows: int) -> list[Any]:
        """The sums over the ranks, in one call, of which the first `count` are weighted by rows.

        Those are Σ rows·array · ranks / Σ rows. A rank without rows counts as zeros, also for NaN.
        """
        communicator = self._replication.communicator
        if not self._usual:
            self._usual = max(1, communicator.all_reduce(rows, "max"))
        precise = any(each.dtype == np.float64 for each in arrays[:count])
        share = np.array([rows / self._usual], np.float64 if precise else np.float32)
        given = [*arrays, share]
        if rows != self._usual:
            given[:count] = [weighted(each, share[0]) for each in arrays[:count]]
        out = self._results.like(given)
        *totals, (shares,) = self._replication.all_reduce_arrays(given, ReduceOp.SUM, out=out)
        if shares not in (0, communicator.size):
            totals[:count] = [weighted(each, communicator.size / shares) for each in totals[:count]]
        return totals


def weighted(array: Array, factor: Any) -> Array:
    """The product in the array's dtype; zeros for a factor of 0, also for NaN."""
    product: Array = array * array.dtype.type(factor) if factor else np.zeros_like(array)
    return product
