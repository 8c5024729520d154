"""Collectives as TensorFlow operations, eagerly and in a `tf.function`.

Eagerly a collective is called at once with the tensors' memory. In a graph it is one
`tf.numpy_function`, whose arrays are the tensors' memory, too, and whose reductions become tensors
without a copy. Every operation reads and assigns one variable, the token. TensorFlow executes the
users of a resource in the order of the program, in branches, loops and called functions as well, so
all ranks execute their collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model import save_context

from strategies.core.options import CommunicationOptions, ReduceOp
from strategies.replication.replication import Replication
from strategies.tensorflow.empty_batches import sums_of_batches, zeros_for_nan
from strategies.tensorflow.failures import OPERATION, carried, install
from strategies.tensorflow.result_memory import ResultMemory
from strategies.tensorflow.row_weights import RowWeights, weighted


class Operations:
    """The collectives of a strategy's ranks on tensors."""

    def __init__(self, replication: Replication) -> None:
        install()
        self.replication = replication
        self.communicator = replication.communicator
        self._compressed = replication.compressed
        self._results = ResultMemory()
        self._weights = RowWeights(replication, self._results)
        with tf.init_scope(), tf.device("/cpu:0"):
            self._token = tf.Variable(0, trainable=False, dtype=tf.int64, name="collectives_token")

    def reduce(
        self,
        values: Sequence[Any],
        mean: bool,
        options: CommunicationOptions | None = None,
        *,
        statistics: Sequence[Any] = (),
        empty: Any = False,
    ) -> list[Any]:
        """The values, tensors and IndexedSlices, reduced over the ranks in one call.

        Tensors of equal dtypes are fused. Slices are concatenated in rank order. The mean of
        integers is float64.

        statistics: tensors of floats, whose results follow.
        empty: bool, or a tensor of one; whether this rank's batch has no rows: NaN of its values
            counts as zero, and its statistics that are NaN don't count.
        """
        slices = [each for each in values if isinstance(each, tf.IndexedSlices)]
        dense = [
            tf.convert_to_tensor(each) for each in values if not isinstance(each, tf.IndexedSlices)
        ]
        dense_totals = iter(self._reduce_dense(dense, statistics, mean, options, empty))
        slices_totals = iter(self._reduce_slices(slices, mean))
        totals = [
            next(slices_totals if isinstance(each, tf.IndexedSlices) else dense_totals)
            for each in values
        ]
        return [*totals, *dense_totals]

    def _reduce_dense(
        self,
        values: Sequence[Any],
        statistics: Sequence[Any],
        mean: bool,
        options: CommunicationOptions | None,
        empty: Any,
    ) -> list[Any]:
        tensors, count = [*values, *statistics], len(values)
        if not tensors:
            return []
        for each in tensors:
            _refuse_strings("reduce", each)

        def call(*given: Any) -> list[Any]:
            arrays, is_empty = list(given[: len(tensors)]), any(given[len(tensors) :])
            out = self._results.like(arrays)
            if is_empty:
                arrays[:count] = zeros_for_nan(arrays[:count])
            totals = self.replication.all_reduce_arrays(arrays, ReduceOp.SUM, options, out=out)
            if any(np.isnan(each).any() for each in totals[count:]):
                totals[count:] = sums_of_batches(self.replication, arrays[count:], is_empty)
            return totals

        # Most programs know it while they are traced: the operation needs no input for it.
        inputs = tensors if empty is False else [*tensors, tf.convert_to_tensor(empty)]
        totals = self.execute(call, inputs, [each.shape for each in tensors])
        return [_divided(each, self.communicator.size) for each in totals] if mean else totals

    def sums_by_rows(self, tensors: Sequence[Any], others: Sequence[Any], rows: Any) -> list[Any]:
        """Sums over the ranks in one call: of tensors as `RowWeights` does it, and of others.

        `rows` is an integer tensor, the number of rows of this rank.
        """
        summed = [*tensors, *others]

        def call(*given: Any) -> list[Any]:
            *arrays, count = given
            return self._weights.sums(arrays, len(tensors), int(count))

        return self.execute(call, [*summed, rows], [each.shape for each in summed])

    def compressed_sums(
        self, tensors: Sequence[Any], others: Sequence[Any], rows: Any, of: Hashable
    ) -> list[Any]:
        """As `sums_by_rows`, but the tensors are compressed between nodes.

        rows: None for sums of the tensors as they are.
        of: as of `CompressedReducer.all_reduce_many`.
        """
        assert self._compressed is not None
        compressed, count = self._compressed, len(tensors)

        def call(*given: Any) -> list[Any]:
            arrays, exact = list(given[:count]), list(given[count:])
            totals = self.replication.all_reduce_arrays(exact, ReduceOp.SUM) if exact else []
            if rows is not None:
                all_rows = totals.pop()
                share = exact[-1] * self.communicator.size / max(1, all_rows)
                arrays = [weighted(each, share) for each in arrays]
            return [*compressed.all_reduce_many(arrays, "sum", of=of), *totals]

        summed = [*tensors, *others]
        inputs = summed if rows is None else [*summed, rows]
        return self.execute(call, inputs, [each.shape for each in summed])

    def _reduce_slices(self, slices: Sequence[Any], mean: bool) -> list[Any]:
        if not slices:
            return []
        count = len(slices)

        def call(*arrays: Any) -> list[Any]:
            return [self.communicator.all_gather(each) for each in arrays]

        inputs = [*(each.values for each in slices), *(each.indices for each in slices)]
        shapes = [tf.TensorShape([None]).concatenate(each.shape[1:]) for each in inputs]
        outputs = self.execute(call, inputs, shapes)
        values = outputs[:count]
        if mean:
            values = [_divided(each, self.communicator.size) for each in values]
        return [
            tf.IndexedSlices(total, indices, each.dense_shape)
            for total, indices, each in zip(values, outputs[count:], slices, strict=True)
        ]

    def gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """The ranks' tensors, joined along the axis in rank order. Lengths there may differ."""
        value = tf.convert_to_tensor(value)
        _refuse_strings("gather", value)
        shape = value.shape
        if shape.rank is not None:
            if not -shape.rank <= axis < shape.rank:
                raise ValueError(f"gather: no axis {axis} in a tensor of shape {shape}")
            place = axis % shape.rank
            shape = tf.TensorShape([*shape[:place], None, *shape[place + 1 :]])
        gather = partial(self.replication.all_gather, axis=axis, options=options)
        return self._execute_one(gather, value, shape)

    def broadcast(self, value: Any) -> Any:
        """The first rank's tensor or IndexedSlices. Shapes of tensors are equal on all ranks."""
        if isinstance(value, tf.IndexedSlices):
            if self.communicator.rank:
                rows = value.values[:0], value.indices[:0]
                value = tf.IndexedSlices(*rows, value.dense_shape)
            return self._reduce_slices([value], mean=False)[0]
        value = tf.convert_to_tensor(value)
        return self._execute_one(self.replication.broadcast_first, value, value.shape)

    def mirror(self, value: Any) -> Any:
        """The chief's value of a new variable; a MismatchError where shapes or dtypes differ."""
        if self.communicator.size == 1:
            return value
        what = "a variable's initial value"
        mirror = self.replication.mirror
        return self._execute_one(lambda own: mirror(np.array(own), what), value, value.shape)

    def _execute_one(self, call: Callable[[Any], Any], value: Any, shape: Any) -> Any:
        """Call a function of one array with a tensor; its result, of that shape."""
        return self.execute(lambda array: [call(array)], [value], [shape])[0]

    def execute(
        self, call: Callable[..., Sequence[Any]], inputs: Sequence[Any], shapes: Sequence[Any]
    ) -> list[Any]:
        """Call a function of arrays with tensors.

        Its results, as many as there are shapes, have the dtypes of the first inputs.
        """
        if tf.executing_eagerly():
            # Of tensors without axes NumPy makes scalars.
            results = call(*[np.asarray(each.numpy()) for each in inputs])
            return [tf.convert_to_tensor(each) for each in results]

        def operation(*arrays: Any) -> list[Any]:
            try:
                return [np.asarray(each) for each in call(*map(np.asarray, arrays))]
            except Exception as error:
                raise carried(error) from None

        _refuse_saving()
        before = self._token.read_value()
        with tf.control_dependencies([before]):
            dtypes = [each.dtype for each in inputs[: len(shapes)]]
            outputs = tf.numpy_function(operation, inputs, dtypes, name=OPERATION)
        with tf.control_dependencies(outputs):
            self._token.assign(before)
        for output, shape in zip(outputs, shapes, strict=True):
            output.set_shape(shape)
        return list(outputs)


def _refuse_saving() -> None:
    """ValueError where the function being traced is part of a SavedModel, now or later."""
    problem = (
        "a function with a collective of strategies.tensorflow (reduce, gather, all_reduce, an"
        " optimizer's apply, a variable that is aggregated when read) can't be part of a"
        " SavedModel, which one process uses: keep it out of the object that is saved"
    )
    if save_context.in_save_context():
        raise ValueError(problem)
    if tf.inside_function():
        tf.compat.v1.get_default_graph().mark_as_unsaveable(problem)


def _refuse_strings(call: str, tensor: Any) -> None:
    if tensor.dtype in (tf.string, tf.resource, tf.variant):
        raise TypeError(
            f"{call}: a tensor of dtype {tensor.dtype.name}: must be of numbers or bool. For"
            " strings, communicator.all_gather_object(tensor.numpy().tolist()) outside of a"
            " tf.function"
        )


def _divided(total: Any, count: int) -> Any:
    """The mean; float64 for integers, as TensorFlow's is."""
    return tf.math.truediv(total, tf.cast(count, total.dtype))


@tf.custom_gradient
def in_place_of(own: Any, value: Any) -> Any:
    """The value, with the derivative of the other tensor."""
    return tf.identity(value), lambda given: (given, None)
