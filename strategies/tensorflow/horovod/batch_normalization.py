"""Batch normalization over the rows of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from collectives.horovod.process_sets import ranks_of
from collectives.reductions.reduction import ReduceOp
from strategies.tensorflow.horovod.compression import Compression
from strategies.tensorflow.horovod.reductions import allreduce, reduce_all


@keras.saving.register_keras_serializable("collectives")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization`, whose mean and variance are of the rows of all ranks.

    Ranks may have different numbers of rows. Each step of training makes two calls. A MismatchError
    on every rank where momentum, epsilon or axis differ.
    """

    def __init__(self, *given: Any, fused: bool = False, **named: Any) -> None:
        """ValueError for `fused`."""
        if fused:
            raise ValueError("fused=True: must be False")
        super().__init__(*given, **named)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        axes = self._reduction_axes
        given = tf.convert_to_tensor(inputs)  # float32 or float64
        weights = tf.ones_like(given)
        if mask is not None:
            weights *= tf.cast(tf.expand_dims(mask, -1), given.dtype)
        sums = tf.reduce_sum(given * weights, axes), tf.reduce_sum(weights, axes)
        settings = f"SyncBatchNormalization: {self.momentum=}, {self.epsilon=}, {self.axis=}"
        (added,) = reduce_all(
            [tf.stack(sums)],
            ReduceOp.SUM,
            comm=ranks_of(None),
            compression=Compression.none,
            what=settings.replace("self.", ""),
        )
        total, count = tf.unstack(added)
        count = tf.maximum(count, 1)
        mean = total / count
        # Not the mean of squares less the square of the mean, which may be two large numbers.
        shape = [1 if axis in axes else -1 for axis in range(given.shape.rank)]
        squares = tf.square(given - tf.reshape(mean, shape)) * weights
        variance = allreduce(tf.reduce_sum(squares, axes), op=ReduceOp.SUM) / count
        return mean, variance
