"""Reductions for all replicas, agreed on before anything is sent.

TensorFlow's collectives stay broken for the rest of the process after one mismatch; here every rank
first tells what it holds, so that all raise the same error and the next call works.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, DtypeMismatchError, ShapeMismatchError
from strategies import nest
from strategies.reduce_op import ReduceOp

Array = NDArray[Any]


@dataclass(frozen=True)
class _Report:
    """What a rank holds: shapes and dtypes, the lengths summed over, or what is wrong."""

    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    problem: str | None = None

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return ", ".join(f"{dtype} of shape {shape}" for shape, dtype in pairs) or "no arrays"


def agree(communicator: Communicator, arrays: Sequence[Array], what: str) -> None:
    """The same MismatchError on every rank where shapes or dtypes differ. Collective."""
    report = _Report(tuple(a.shape for a in arrays), tuple(a.dtype.name for a in arrays))
    _check_equal(communicator.all_gather_object(report), what)


def _check_equal(reports: Sequence[_Report], what: str) -> None:
    calls = tuple(str(report) for report in reports)
    if any(report.problem for report in reports):
        lines = [f"  rank {rank}: {call}" for rank, call in enumerate(calls)]
        raise ValueError("\n".join([f"{what}: not every rank's value can be reduced", *lines]))
    if len({report.shapes for report in reports}) > 1:
        raise ShapeMismatchError(f"{what}: the ranks' shapes differ", calls)
    if len({report.dtypes for report in reports}) > 1:
        raise DtypeMismatchError(f"{what}: the ranks' dtypes differ", calls)


def reduce_nest(communicator: Communicator, op: ReduceOp, value: Any, axis: Any) -> Any:
    """`Strategy.reduce`, between the ranks of the communicator."""
    given = nest.leaves(value)
    if axis is None:
        agree(communicator, [np.asarray(leaf) for leaf in given], "reduce")
        return nest.pack_like(value, communicator.all_reduce_many(_values(given), op.value))
    axes = _check_axis(axis)
    sums, report = _sum_over(given, axes, op)
    reports = communicator.all_gather_object(report)
    _check_equal(reports, f"reduce over axis {axis}")
    totals = communicator.all_reduce_many(sums)
    if op is ReduceOp.MEAN:
        lengths = np.sum([report.lengths for report in reports], axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            totals = [
                np.asarray(total / length, total.dtype)
                for total, length in zip(totals, lengths, strict=True)
            ]
    return nest.pack_like(value, totals)


def _values(given: Sequence[Any]) -> list[Any]:
    """Variables as their values, so that other arrays keep their kind."""
    return [leaf.read_value() if hasattr(leaf, "read_value") else leaf for leaf in given]


def _check_axis(axis: Any) -> tuple[int, ...]:
    if isinstance(axis, tuple):
        return tuple(operator.index(each) for each in axis)
    try:
        return (operator.index(axis),)
    except TypeError:
        raise TypeError(f"axis={axis!r}: must be None, an integer or a tuple of integers") from None


def _sum_over(
    given: Sequence[Any], axes: tuple[int, ...], op: ReduceOp
) -> tuple[list[Array], _Report]:
    """This replica's sums, and what it reports; a missing axis is reported, not raised."""
    arrays = [np.asarray(leaf) for leaf in given]
    try:
        sums = [_sum(array, axes, op) for array in arrays]
        lengths = tuple(math.prod(array.shape[axis] for axis in axes) for array in arrays)
    except (np.exceptions.AxisError, IndexError, ValueError) as error:
        return [], _Report(problem=f"{error}, shapes {[array.shape for array in arrays]}")
    shapes, dtypes = tuple(s.shape for s in sums), tuple(s.dtype.name for s in sums)
    return sums, _Report(shapes, dtypes, lengths)


def _sum(array: Array, axes: tuple[int, ...], op: ReduceOp) -> Array:
    """The sum in the array's own dtype; as float64 where the mean of integers is wanted."""
    dtype = array.dtype
    if op is ReduceOp.MEAN and dtype.kind in "biu":
        dtype = np.dtype(np.float64)
    wide = np.float32 if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
    return np.asarray(np.sum(array, axis=axes, dtype=wide), dtype)
