"""Losses of a replica, scaled so that their gradients may be summed over the replicas.

As `tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss`.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from strategies.contexts import get_strategy, in_cross_replica_context


def _require_replica_context(what: str) -> None:
    if in_cross_replica_context():
        raise RuntimeError(f"{what} must be called as a replica, inside `run`")


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any:
    """The sum of this replica's losses, one per example, divided by the global batch size.

    The default global batch size is this replica's times the number of replicas, which is wrong for
    the last batch of an epoch if it is cut unevenly: give the true one there. An empty batch has
    loss zero. Raises RuntimeError in cross-replica context, ValueError for losses without an axis
    or a negative size, TypeError for a size that isn't an integer.
    """
    _require_replica_context("compute_average_loss")
    losses = np.asarray(per_example_loss)
    if losses.ndim == 0:
        raise ValueError("per_example_loss is a single number: must have one loss per example")
    if sample_weight is not None:
        losses = losses * np.asarray(sample_weight, losses.dtype)
    if global_batch_size is None:
        global_batch_size = len(losses) * get_strategy().num_replicas_in_sync
    size = operator.index(global_batch_size)
    if size < 0:
        raise ValueError(f"global_batch_size={size}: must not be negative")
    total = losses.sum(dtype=losses.dtype)
    return total / losses.dtype.type(size) if losses.size else total


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """The sum of the loss, which every replica computes alike, divided by the number of replicas.

    Raises RuntimeError in cross-replica context.
    """
    _require_replica_context("scale_regularization_loss")
    loss = np.asarray(regularization_loss)
    return loss.sum(dtype=loss.dtype) / loss.dtype.type(get_strategy().num_replicas_in_sync)
