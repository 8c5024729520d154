"""The sum of TensorFlow gradients over the replicas, before an optimizer clips or accumulates them.

The gradients of Keras's loss count by the rows of each replica, since it is a mean over these rows,
divided by the number of replicas.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

from strategies.core.nest import map_by_kind
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
    positions = tuple(index for index, each in enumerate(gradients) if each is not None)
    if replica is None or not positions:
        return list(gradients)
    of = training.list_name(number, positions) if training.owner.compresses else None
    present = [gradients[index] for index in positions]
    step: Step | None = training.step
    if step is None:
        totals = sums_for_optimizer(replica, present, of)
    else:
        totals = _weighted_sums(replica, step, present, of)
    reduced = list(gradients)
    for index, total in zip(positions, totals, strict=True):
        reduced[index] = total
    return reduced


def maxima(_training: Training, tensors: Sequence[Any]) -> list[Any]:
    """The maxima over the replicas, element by element. Collective when it runs."""
    replica = tf.distribute.get_replica_context()
    if replica is None:
        return list(tensors)
    flat = tf.concat([tf.reshape(tf.cast(each, tf.float32), [-1]) for each in tensors], axis=0)
    largest = tf.reduce_max(replica.all_gather(flat[None], axis=0), axis=0)
    parts = tf.split(largest, [each.shape.num_elements() for each in tensors])
    return [
        tf.cast(tf.reshape(part, each.shape), each.dtype)
        for part, each in zip(parts, tensors, strict=True)
    ]


def sums_for_optimizer(replica: Any, gradients: Sequence[Any], of: Hashable = None) -> list[Any]:
    """The sums over the replicas. `of` is as of `gradient_sums`."""
    sums = partial(replica.all_reduce, "SUM")
    if of is None:
        totals: list[Any] = sums(gradients)
        return totals
    return map_by_kind(
        gradients, _is_slices, lambda dense: _dense_sums(replica, dense, None, of), sums
    )


def _weighted_sums(replica: Any, step: Step, gradients: Sequence[Any], of: Hashable) -> list[Any]:
    _restore_statistics(replica.strategy, step)
    wide = [_wide(each) for each in gradients]
    if not step.by_rows:
        there = tf.cast(step.rows > 0, tf.float32)
        totals = sums_for_optimizer(replica, [_product(each, there) for each in wide], of)
    else:
        totals = map_by_kind(
            wide,
            _is_slices,
            lambda dense: _dense_sums(replica, dense, step.rows, of),
            lambda slices: _slices_by_rows(replica, slices, step.rows),
        )
    return [tf.cast(total, each.dtype) for total, each in zip(totals, gradients, strict=True)]


def _is_slices(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _dense_sums(replica: Any, tensors: Sequence[Any], rows: Any, of: Hashable) -> list[Any]:
    def sums(strategy: Any, rows: Any, *tensors: Any) -> list[Any]:
        found: list[Any] = strategy.extended.gradient_sums(tensors, rows, of)
        return found

    totals: list[Any] = replica.merge_call(sums, args=(rows, *tensors))
    return totals


def _slices_by_rows(replica: Any, slices: Sequence[Any], rows: Any) -> list[Any]:
    weight = tf.cast(rows, tf.float32)
    *totals, all_rows = sums_for_optimizer(
        replica, [*(_product(each, weight) for each in slices), weight]
    )
    # None at all are those of a replica that trains alone, in a short last batch.
    factor = tf.math.divide_no_nan(float(replica.num_replicas_in_sync), all_rows)
    return [_product(each, factor) for each in totals]


def _restore_statistics(strategy: Any, step: Step) -> None:
    """Undo this step's changes of running statistics where the replica has no rows."""
    changed = {id(each) for each in strategy.extended.statistics.due()}
    for variable, before in step.statistics:
        if id(variable) in changed:
            variable.assign(tf.where(step.rows > 0, tf.identity(variable), before))


def _product(gradient: Any, factor: Any) -> Any:
    """The gradient times a factor of which 0 gives 0 also for NaN."""
    if _is_slices(gradient):
        values = _product(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


def _wide(gradient: Any) -> Any:
    """In float32 if it is shorter, whose products with rows could overflow."""
    return tf.cast(gradient, tf.float32) if gradient.dtype.size < tf.float32.size else gradient
