"""`Strategy.reduce` and `gather` of nests, which the ranks compare before they send arrays."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from collectives import Communicator, MismatchError
from collectives.arrays.kinds import to_array
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.cuda.runtime import on_gpu
from strategies.core import nest, values
from strategies.core.indexed_slices import IndexedSlices, map_apart, refuse_slices, structure
from strategies.core.options import CommunicationOptions, ReduceOp, as_reduce_op
from strategies.core.reports import Report, agree, explained
from strategies.core.same_error import PropagatedErrors
from strategies.core.values import Array
from strategies.replication.replication import Replication

AllReduce: TypeAlias = Callable[[Sequence[Any], ReduceOp], list[Any]]
"""The arrays, folded over the replicas one by one."""

_NUMBERS = "biufc"
_BARE = frozenset({np.ndarray, np.float64, np.float32, float, int})

_NAMES = {name: op.value for op in ReduceOp for name in (op, op.value, op.value.lower())}
_BARE_REPORTS = {op.value: Report(f"reduce({op.value}, axis=None)", "*") for op in ReduceOp}


def reduce_nest(
    strategy: Replication,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: Any,
    options: CommunicationOptions | None = None,
    *,
    batch: bool = False,
) -> Any:
    """`Strategy.reduce` of a nest; `batch`: cross-device ops get even a single array as a batch."""
    communicator = strategy.communicator
    plainly = not batch and options is None and strategy.reduces_plainly
    if plainly and axis is None and type(value) in _BARE and isinstance(reduce_op, str | ReduceOp):
        name, array = _NAMES.get(reduce_op), np.asarray(value)
        if name is not None and array.dtype.kind in _NUMBERS:
            return _fold_at_once(communicator, array, name, _BARE_REPORTS[name])

    def all_reduce(arrays: Sequence[Any], op: ReduceOp) -> list[Any]:
        return strategy.all_reduce_arrays(arrays, op, options, batch=batch)

    with PropagatedErrors(communicator, "reduce"):
        op, value = as_reduce_op(reduce_op), values.local(value)
        given = _own_values(nest.leaves(value))
        axes = None if axis is None else _check_axis(axis)
        if axes is not None:
            refuse_slices(given, "reduce over an axis")
            _refuse_gpus(given)
        arrays = [_seen(leaf) for leaf in given]
    report = Report(f"reduce({op.value}, axis={axes})", structure(value, given))
    if axes is not None:
        totals = _reduce_over(communicator, arrays, axes, op, report, all_reduce)
    elif plainly and _goes_at_once(given, arrays):
        leaf = given[0] if hasattr(given[0], "__dlpack__") else arrays[0]
        totals = [_fold_at_once(communicator, leaf, op.value, report)]
    else:
        # The number of rows of slices may differ.
        heads = [
            array[:0] if isinstance(leaf, IndexedSlices) else array
            for leaf, array in zip(given, arrays, strict=True)
        ]
        with strategy.deadline(options):
            agree(communicator, report.of(heads), "reduce")
            totals = map_apart(
                given,
                lambda leaves: all_reduce(leaves, op),
                lambda slices: strategy.gather_slices(slices, op),
            )
    return nest.pack_like(value, totals)


def _fold_at_once(communicator: Communicator, array: Any, op: str, report: Report) -> Any:
    """The total of one array, whose shape and dtype every all_reduce compares. Collective.

    The rest of the report is a text that this call compares, so that none precedes it.
    """
    try:
        return communicator.all_reduce(array, op, what=report.text)
    except MismatchError as error:
        raise explained(communicator, report.of([to_array(array)]), "reduce", error) from None


def _goes_at_once(given: Sequence[Any], arrays: Sequence[Any]) -> bool:
    """Whether it is a single array of numbers that `all_reduce` takes by itself."""
    return (
        len(given) == 1
        and arrays[0].dtype.kind in _NUMBERS
        and not isinstance(given[0], IndexedSlices)
    )


def _seen(leaf: Any) -> Array:
    """An array of the host as NumPy, one on a GPU where it is."""
    content = leaf.values if isinstance(leaf, IndexedSlices) else leaf
    if not on_gpu(content):
        return values.as_array(content, "value")
    refuse_lost_gradient(content, "value")
    return to_array(content, "value")


def _refuse_gpus(given: Sequence[Any]) -> None:
    if any(on_gpu(leaf) for leaf in given):
        raise TypeError(
            "reduce over an axis takes arrays of the host: sum over the axis first and reduce with"
            " axis=None, or give the array's get()"
        )


def gather_nest(strategy: Replication, value: Any, axis: int) -> Any:
    """`Strategy.gather` of a nest."""
    communicator = strategy.communicator
    with PropagatedErrors(communicator, "gather"):
        given = _own_values(nest.leaves(value))
        (place,) = _check_axis((axis,))
        refuse_slices(given, "gather")
        shapes = [np.shape(leaf) for leaf in given]
    problem = None
    if () in shapes:
        problem = f"gather takes arrays of at least one axis, not of shapes {shapes}"
    elif any(not -len(shape) <= place < len(shape) for shape in shapes):
        problem = f"no axis {place} in arrays of shapes {shapes}"
    report = Report(f"gather(axis={place})", nest.structure(value), problem=problem)
    agree(communicator, report, "gather")
    with PropagatedErrors(communicator, "gather"):
        return nest.pack_like(value, [strategy.all_gather(leaf, place) for leaf in given])


def _own_values(given: Sequence[Any]) -> list[Any]:
    """Variables as this replica's values, so that other arrays keep their kind."""
    if len(given) == 1 and given[0] is None:
        raise TypeError(values.NOTHING)
    # An ON_READ variable's read_value is the replicas' aggregate already.
    return [
        leaf.storage.read() if getattr(leaf, "on_read", False) else values.content(leaf)
        for leaf in given
    ]


def _check_axis(axis: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, axis if isinstance(axis, tuple) else (axis,)))
    except TypeError:
        raise TypeError(f"axis={axis!r}: must be None, an integer or a tuple of integers") from None


def _reduce_over(
    communicator: Communicator,
    arrays: Sequence[Array],
    axes: tuple[int, ...],
    op: ReduceOp,
    report: Report,
    all_reduce: AllReduce,
) -> list[Any]:
    """The totals over the axes, too; a missing axis is reported, not raised."""
    report = report.of(arrays)
    sums: list[Array] = []
    try:
        sums = [_sum(array, axes, op) for array in arrays]
        lengths = [math.prod(array.shape[axis] for axis in axes) for array in arrays]
        report = report._replace(shapes=tuple(total.shape for total in sums))
    except (np.exceptions.AxisError, IndexError, TypeError, ValueError) as error:
        report = report._replace(problem=f"{error}, in {report}")
    agree(communicator, report, "reduce")
    totals = all_reduce(sums, ReduceOp.SUM)
    if op is ReduceOp.SUM or not totals:
        return totals
    counts = communicator.all_reduce(np.array(lengths, np.int64))
    with np.errstate(invalid="ignore", divide="ignore"):
        return [
            np.asarray(total / count, total.dtype if array.dtype.kind in "biu" else array.dtype)
            for total, count, array in zip(totals, counts, arrays, strict=True)
        ]


def _sum(array: Array, axes: tuple[int, ...], op: ReduceOp) -> Array:
    """The sum in the array's own dtype; for a mean wide enough that it doesn't overflow."""
    dtype = array.dtype
    if dtype.kind not in "biufcV":
        raise TypeError("only numbers can be summed")
    mean = op is ReduceOp.MEAN
    wide = values.dtype_of_sum(dtype) if mean or dtype.kind not in "biu" else dtype
    return np.asarray(np.sum(array, axis=axes, dtype=wide), wide if mean else dtype)
