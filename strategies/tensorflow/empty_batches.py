"""Steps in which this replica's batch has no rows, as at the end of unequal data.

Their derivatives are zero, but that of batch normalization, for example, is computed as 0 · NaN,
since the mean of no rows is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


class EmptyBatches:
    """Whether the present `run` has such a batch; of TensorFlow, for traced functions."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/cpu:0"):
            # Of no strategy, whose scope surrounds this.
            self._empty = ResourceVariable(False, trainable=False, name="batch_is_empty")

    def note(self, arguments: Any) -> None:
        """Note the arguments of a `run`: whether those that have rows have none."""
        tensors = [each for each in tf.nest.flatten(arguments) if tf.is_tensor(each)]
        rowed = [each for each in tensors if isinstance(each, tf.Tensor) and each.shape.rank]
        lengths = [each.shape[0] for each in rowed]
        if not rowed or any(lengths):
            self._empty.assign(False)
        else:
            counts = [tf.shape(each)[0] for each in rowed]
            self._empty.assign(tf.reduce_max(tf.stack(counts)) == 0)

    def zeros_for_nan(self, values: Sequence[Any]) -> list[Any]:
        """The values, in whose tensors of floats NaN is replaced by 0 if the batch is empty."""
        found = list(values)
        floats = [
            number
            for number, each in enumerate(found)
            if isinstance(each, tf.Tensor) and each.dtype.is_floating
        ]
        if not floats:
            return found
        tensors = [found[number] for number in floats]

        def replaced() -> list[Any]:
            return [tf.where(tf.math.is_nan(each), tf.zeros_like(each), each) for each in tensors]

        results = tf.cond(self._empty.read_value(), replaced, lambda: tensors)
        # A list of one tensor comes back as the tensor.
        results = results if isinstance(results, list) else [results]
        for number, each in zip(floats, results, strict=True):
            found[number] = each
        return found
