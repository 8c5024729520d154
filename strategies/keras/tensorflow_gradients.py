"""The sum of TensorFlow gradients over the replicas, before an optimizer clips or accumulates them.

The gradients of Keras's loss count by the rows of each replica, since it is a mean over these rows,
divided by the number of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from strategies.keras.training import Training


@dataclass
class Step:
    """What the reduction of gradients needs of the step that is being traced."""

    rows: Any
    """A scalar tensor: the rows of this replica."""
    by_rows: bool = False
    """Whether gradients count by rows: they are those of a mean that Keras has computed."""
    statistics: list[tuple[Any, Any]] = field(default_factory=list)
    """Variables of running statistics, and their values before the step."""


def reduce_gradients(
    training: Training, number: int, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """The sums over the replicas. None stays None. Collective when it runs.

    The optimizer's number isn't compared, since TensorFlow keeps the program's order. A replica
    without rows counts as zeros, and its running statistics are as before the step.
    """
    replica = tf.distribute.get_replica_context()
    present = [each for each in gradients if each is not None]
    if replica is None or not present:
        return list(gradients)
    step: Step | None = training.step
    if step is None:
        totals = replica.all_reduce("SUM", present)
    else:
        totals = _weighted_sums(replica, step, present)
    reduced = iter(totals)
    return [None if each is None else next(reduced) for each in gradients]


def _weighted_sums(replica: Any, step: Step, gradients: Sequence[Any]) -> list[Any]:
    _restore_statistics(replica.strategy, step)
    wide = [_wide(each) for each in gradients]
    if not step.by_rows:
        there = tf.cast(step.rows > 0, tf.float32)
        totals = replica.all_reduce("SUM", [_product(each, there) for each in wide])
    else:
        dense = [each for each in wide if not isinstance(each, tf.IndexedSlices)]
        slices = [each for each in wide if isinstance(each, tf.IndexedSlices)]
        sums = iter(_sums_by_rows(replica, dense, step.rows) if dense else ())
        slices_sums = iter(_slices_by_rows(replica, slices, step.rows) if slices else ())
        totals = [
            next(slices_sums if isinstance(each, tf.IndexedSlices) else sums) for each in wide
        ]
    return [tf.cast(total, each.dtype) for total, each in zip(totals, gradients, strict=True)]


def _sums_by_rows(replica: Any, tensors: Sequence[Any], rows: Any) -> list[Any]:
    def sums(strategy: Any, rows: Any, *tensors: Any) -> list[Any]:
        found: list[Any] = strategy.extended.sums_by_rows(tensors, rows)
        return found

    totals: list[Any] = replica.merge_call(sums, args=(rows, *tensors))
    return totals


def _slices_by_rows(replica: Any, slices: Sequence[Any], rows: Any) -> list[Any]:
    weight = tf.cast(rows, tf.float32)
    *totals, all_rows = replica.all_reduce("SUM", [*(_product(s, weight) for s in slices), weight])
    factor = replica.num_replicas_in_sync / all_rows
    return [_product(each, factor) for each in totals]


def _restore_statistics(strategy: Any, step: Step) -> None:
    """Undo this step's changes of running statistics where the replica has no rows."""
    changed = {id(each) for each in strategy.extended.statistics.due()}
    for variable, before in step.statistics:
        if id(variable) in changed:
            variable.assign(tf.where(step.rows > 0, tf.identity(variable), before))


def _product(gradient: Any, factor: Any) -> Any:
    """The gradient times a factor of which 0 gives 0 also for NaN."""
    if isinstance(gradient, tf.IndexedSlices):
        values = _product(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


def _wide(gradient: Any) -> Any:
    """In float32 if it is shorter, whose products with rows could overflow."""
    return tf.cast(gradient, tf.float32) if gradient.dtype.size < tf.float32.size else gradient
