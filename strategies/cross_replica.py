"""Reductions for all replicas, agreed on before anything is sent.

TensorFlow's collectives stay broken for the rest of the process after one mismatch; here every rank
first tells what it holds, so that all raise the same error and the next call works.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, DtypeMismatchError, OpMismatchError, ShapeMismatchError
from collectives.arrays import to_array
from collectives.devices.cuda import on_gpu
from collectives.scopes import named_scope
from collectives.uncaught import raising_on_all
from strategies import nest
from strategies.reduce_op import ReduceOp, as_reduce_op
from strategies.refusals import RefusedTogether
from strategies.variables.indexed_slices import (
    IndexedSlices,
    map_apart,
    reduce_slices,
    refuse_slices,
)

Array = NDArray[Any]

AllReduce: TypeAlias = Callable[[Sequence[Any], ReduceOp], list[Any]]
"""The arrays, folded over the replicas one by one."""


@dataclass(frozen=True)
class _Report:
    """What a rank asks for, the nest it holds, and of its arrays the shapes, the dtypes and the
    lengths summed over; or what is wrong.
    """

    call: str = ""
    structure: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    problem: str | None = None

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return (
            ", ".join(f"{dtype} of shape {shape}" for shape, dtype in pairs)
            or self.call
            or "no arrays"
        )


def agree(communicator: Communicator, arrays: Sequence[Array], what: str, call: str = "") -> None:
    """The same MismatchError on every rank where shapes, dtypes or calls differ. Collective."""
    _compared(communicator, _described(arrays, call), what)


def _described(arrays: Sequence[Array], call: str = "", structure: str = "") -> _Report:
    shapes = tuple(array.shape for array in arrays)
    return _Report(call, structure, shapes, tuple(array.dtype.name for array in arrays))


def _compared(communicator: Communicator, report: _Report, what: str) -> list[_Report]:
    """Every rank's report; an error where they don't fit together."""
    with named_scope(communicator, what):
        reports = communicator.all_gather_object(report)
    with raising_on_all(communicator.rank):
        _check_equal(reports, what)
    return reports


def _check_equal(reports: Sequence[_Report], what: str) -> None:
    if len({report.call for report in reports}) > 1:
        asked = tuple(report.call for report in reports)
        same = len({call.partition("(")[0] for call in asked}) == 1
        differ = f"{what}: the ranks' arguments differ" if same else "the ranks' calls differ"
        raise OpMismatchError(differ, asked)
    calls = tuple(str(report) for report in reports)
    if any(report.problem for report in reports):
        lines = [f"  rank {rank}: {call}" for rank, call in enumerate(calls)]
        raise ValueError("\n".join([f"{what}: not every rank's value will do", *lines]))
    if len({report.structure for report in reports}) > 1:
        nests = tuple(report.structure for report in reports)
        raise ShapeMismatchError(f"{what}: the ranks' nests differ, * being an array", nests)
    if len({report.shapes for report in reports}) > 1:
        raise ShapeMismatchError(f"{what}: the ranks' shapes differ", calls)
    if len({report.dtypes for report in reports}) > 1:
        raise DtypeMismatchError(f"{what}: the ranks' dtypes differ", calls)


def reduce_nest(
    communicator: Communicator,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: Any,
    all_reduce: AllReduce | None = None,
) -> Any:
    """`Strategy.reduce`, between the ranks of the communicator, by its all-reduce or another."""
    fold = all_reduce or _all_reduce_of(communicator)
    with RefusedTogether(communicator, "reduce"):
        op = as_reduce_op(reduce_op)
        given = _own_values(nest.leaves(value))
        axes = None if axis is None else _check_axis(axis)
        refuse_slices(given if axes is not None else (), "reduce over an axis")
        arrays = [_seen(leaf) for leaf in given]
        if axes is not None:
            _refuse_gpus(given)
    call, structure = f"reduce({op.value}, axis={axes})", _structure(value, given)
    if axes is None:
        heads = [_rows_alone(leaf, array) for leaf, array in zip(given, arrays, strict=True)]
        report = _described(heads, call, structure)
        _compared(communicator, report, "reduce")
        folded = map_apart(
            given,
            lambda arrays: fold(arrays, op),
            lambda slices: reduce_slices(communicator, slices, op),
        )
        return nest.pack_like(value, folded)
    sums, report = _sum_over(arrays, axes, op, _described(arrays, call, structure))
    reports = _compared(communicator, report, "reduce")
    totals = fold(sums, ReduceOp.SUM)
    if op is ReduceOp.MEAN:
        lengths = np.sum([report.lengths for report in reports], axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            totals = [
                np.asarray(total / length, total.dtype)
                for total, length in zip(totals, lengths, strict=True)
            ]
    return nest.pack_like(value, totals)


def _seen(leaf: Any) -> Array:
    """An array of the host as NumPy, one on a GPU where it is."""
    return to_array(leaf) if on_gpu(leaf) else np.asarray(getattr(leaf, "values", leaf))


def _refuse_gpus(given: Sequence[Any]) -> None:
    if any(on_gpu(leaf) for leaf in given):
        raise TypeError(
            "reduce over an axis takes arrays of the host: sum over the axis first and reduce with"
            " axis=None, or give the array's get()"
        )


def _structure(value: Any, given: Sequence[Any]) -> str:
    """The nest, and which of its arrays are rows of larger ones."""
    rows = [
        f"{place}: rows of {leaf.dense_shape}"
        for place, leaf in enumerate(given)
        if isinstance(leaf, IndexedSlices)
    ]
    return nest.structure(value) + (f" with {', '.join(rows)}" if rows else "")


def _rows_alone(leaf: Any, array: Array) -> Array:
    """What must be equal of a leaf: the number of rows need not be."""
    return array[:0] if isinstance(leaf, IndexedSlices) else array


def _all_reduce_of(communicator: Communicator) -> AllReduce:
    return lambda arrays, op: communicator.all_reduce_many(arrays, op.value)


def gather_nest(
    communicator: Communicator,
    value: Any,
    axis: int,
    all_gather: Callable[[Any, int], Any] | None = None,
) -> Any:
    """`Strategy.gather`, between the ranks of the communicator, by its all-gather or another."""
    join = all_gather or (lambda leaf, place: communicator.all_gather(leaf, axis=place))
    with RefusedTogether(communicator, "gather"):
        given = _own_values(nest.leaves(value))
        (place,) = _check_axis((axis,))
        refuse_slices(given, "gather")
        shapes = [np.shape(leaf) for leaf in given]
    lacking = any(not -max(len(shape), 1) <= place < max(len(shape), 1) for shape in shapes)
    problem = f"no axis {place} in arrays of shapes {shapes}" if lacking else None
    report = _Report(f"gather(axis={place})", nest.structure(value), problem=problem)
    _compared(communicator, report, "gather")
    with RefusedTogether(communicator, "gather"):
        return nest.pack_like(value, [join(leaf, place) for leaf in given])


def _own_values(given: Sequence[Any]) -> list[Any]:
    """Variables as this replica's values, so that other arrays keep their kind."""
    return [_own_value(leaf) if hasattr(leaf, "read_value") else leaf for leaf in given]


def _own_value(variable: Any) -> Any:
    # What an ON_READ variable reads as here is the replicas' aggregate already.
    own = getattr(variable, "on_read", False)
    return variable.storage.read() if own else variable.read_value()


def _check_axis(axis: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, axis if isinstance(axis, tuple) else (axis,)))
    except TypeError:
        raise TypeError(f"axis={axis!r}: must be None, an integer or a tuple of integers") from None


def _sum_over(
    arrays: Sequence[Array], axes: tuple[int, ...], op: ReduceOp, given: _Report
) -> tuple[list[Array], _Report]:
    """This replica's sums, and what it reports; a missing axis is reported, not raised."""
    try:
        sums = [_sum(array, axes, op) for array in arrays]
        lengths = tuple(math.prod(array.shape[axis] for axis in axes) for array in arrays)
    except (np.exceptions.AxisError, IndexError, TypeError, ValueError) as error:
        return [], replace(given, problem=f"{error}, in {given}")
    return sums, replace(given, shapes=tuple(total.shape for total in sums), lengths=lengths)


def _sum(array: Array, axes: tuple[int, ...], op: ReduceOp) -> Array:
    """The sum in the array's own dtype; as float64 where the mean of integers is wanted."""
    dtype = array.dtype
    if dtype.kind not in "biufcV":
        raise TypeError("only numbers can be summed")
    if op is ReduceOp.MEAN and dtype.kind in "biu":
        dtype = np.dtype(np.float64)
    wide = np.float32 if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
    return np.asarray(np.sum(array, axis=axes, dtype=wide), dtype)
