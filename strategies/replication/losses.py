"""Losses of a replica, scaled so that their gradients may be summed over the replicas.

As `tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strategies.core.values import Array, as_array, dtype_of_sum, whole_number
from strategies.replication.contexts import get_strategy, in_cross_replica_context


def _require_replica_context(what: str) -> None:
    if in_cross_replica_context():
        raise RuntimeError(f"{what} must be called as a replica, inside `run`")


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any:
    """The sum of this replica's losses, one per example, divided by the global batch size.

    The default global batch size is this replica's times the number of replicas, which is wrong for
    the last batch of an epoch if it is cut unevenly: give the true one there. `sample_weight` is a
    number, or one for each example or loss. An empty batch has loss zero, and so has a global batch
    size of zero. Raises RuntimeError in cross-replica context, ValueError for losses without an
    axis, weights that don't fit or a negative size, TypeError for a size that isn't an integer.
    """
    _require_replica_context("compute_average_loss")
    losses = as_array(per_example_loss, "per_example_loss")
    if losses.ndim == 0:
        raise ValueError("per_example_loss is a single number: must have one loss per example")
    if sample_weight is not None:
        exact = losses.astype(np.float64) if losses.dtype.kind in "biu" else losses
        losses = exact * broadcast_weights(sample_weight, losses)
    if global_batch_size is None:
        global_batch_size = len(losses) * get_strategy().num_replicas_in_sync
    return _sum_over(losses, whole_number("global_batch_size", global_batch_size, 0))


def _sum_over(losses: Array, size: int) -> Any:
    """The sum divided by the size, zero for size 0, in the losses' dtype; float64 of integers."""
    wide = dtype_of_sum(losses.dtype)
    dtype = wide if losses.dtype.kind in "biu" else losses.dtype
    return dtype.type(losses.sum(dtype=wide) / wide.type(size) if size else 0)


def broadcast_weights(sample_weight: Any, losses: Array) -> Array:
    """One weight for each loss: missing trailing axes are added, those of length one dropped."""
    dtype = None if losses.dtype.kind in "biu" else losses.dtype
    weights = as_array(sample_weight, "sample_weight", dtype)
    while weights.ndim > losses.ndim and weights.shape[-1] == 1:
        weights = weights[..., 0]
    missing = losses.ndim - weights.ndim
    try:
        return np.broadcast_to(weights.reshape(weights.shape + (1,) * missing), losses.shape)
    except ValueError:
        raise ValueError(
            f"sample_weight has shape {weights.shape}: must be a number, or have the shape of the"
            f" losses, {losses.shape}, up to trailing axes"
        ) from None


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """The sum of the loss, equal on all replicas, divided by the number of replicas.

    Raises RuntimeError in cross-replica context.
    """
    _require_replica_context("scale_regularization_loss")
    loss = as_array(regularization_loss, "regularization_loss")
    return _sum_over(loss, get_strategy().num_replicas_in_sync)
