"""Collectives as TensorFlow operations, eagerly and in a `tf.function`.

Reductions become tensors without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values

from strategies.core.nest import map_by_kind
from strategies.core.options import CommunicationOptions, ReduceOp
from strategies.core.same_error import PropagatedErrors
from strategies.core.values import NOTHING
from strategies.replication.replication import Replication
from strategies.tensorflow.empty_batches import sums_of_batches, zeros_for_nan
from strategies.tensorflow.program_order import ProgramOrder
from strategies.tensorflow.result_memory import ResultMemory
from strategies.tensorflow.row_weights import RowWeights, weighted


class Operations:
    """The collectives of a strategy's ranks on tensors."""

    def __init__(self, replication: Replication) -> None:
        self._order, self._compared = ProgramOrder(), ""
        self.replication = replication
        self.communicator = replication.communicator
        self._compressed = replication.compressed
        self._results = ResultMemory()
        self._weights = RowWeights(replication, self._results)

    @contextmanager
    def comparing(self, what: str) -> Iterator[None]:
        """A context whose next operation raises a MismatchError where the ranks' texts differ."""
        self._compared = ", ".join(filter(None, [self._compared, what]))
        try:
            yield
        finally:
            self._compared = ""

    def execute(
        self, call: Callable[..., Sequence[Any]], inputs: Sequence[Any], shapes: Sequence[Any]
    ) -> list[Any]:
        """As of ProgramOrder."""
        what, self._compared = self._compared, ""
        if not what:
            return self._order.execute(call, inputs, shapes)

        def compared(*arrays: Any) -> Sequence[Any]:
            self.communicator.barrier(what)
            return call(*arrays)

        return self._order.execute(compared, inputs, shapes)

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
        integers of 32 and 64 bits is float64, of shorter ones float32, as TensorFlow's division.

        statistics: tensors of floats, whose results follow.
        empty: bool, or a tensor of one; whether this rank's batch has no rows: NaN of its values
            counts as zero, and its statistics that are NaN don't count.
        """
        by_mean = mean and not statistics and all(map(_is_dense_of_floats, values))
        if mean and not statistics and not by_mean:
            # Their sum is divided here: the call doesn't show that it is a mean.
            self.compare("MEAN of integers or IndexedSlices")
        op = ReduceOp.MEAN if by_mean else ReduceOp.SUM

        def reduce_dense(dense: Sequence[Any]) -> list[Any]:
            totals = self._reduce_dense(dense, len(statistics), op, options, empty)
            if mean and not by_mean:
                return [_divided(each, self.communicator.size) for each in totals]
            return totals

        return map_by_kind(
            [*values, *statistics],
            lambda each: isinstance(each, tf.IndexedSlices),
            reduce_dense,
            lambda slices: self._reduce_slices(slices, mean),
        )

    def compare(self, what: str) -> None:
        """A MismatchError on every rank where the texts differ. Collective."""
        with self.comparing(what):
            self.execute(lambda number: [number], [tf.constant(0)], [[]])

    def compare_reduction(self, op: Any, ranks: Sequence[int | None], axis: Any) -> None:
        """An error on every rank where the arguments of `Strategy.reduce` differ, or are wrong.

        ranks: the numbers of the values' axes, None where one isn't known.
        """
        with PropagatedErrors(self.communicator, "reduce"):
            op_of(op)
            for each in () if axis is None else tf.nest.flatten(axis):
                if isinstance(each, tf.Tensor):
                    raise TypeError(f"reduce: axis={axis!r}: must be of int, or None")
                for rank in ranks:
                    if rank is not None and not -rank <= each < rank:
                        raise ValueError(f"reduce: axis={each}: the value has {rank} axes")
            for rank in filter(None, ranks):
                places = [] if axis is None else [each % rank for each in tf.nest.flatten(axis)]
                if len(set(places)) < len(places):
                    raise ValueError(f"reduce: axis={axis}: one of the {rank} axes is there twice")
        if axis is not None and self.communicator.size > 1:
            # TensorFlow adds up the values of this replica before it calls the strategy.
            self.compare(f"reduce over the axis {axis}")

    def _reduce_dense(
        self,
        values: Sequence[Any],
        statistics: int,
        op: ReduceOp,
        options: CommunicationOptions | None,
        empty: Any,
    ) -> list[Any]:
        """The last values are so many statistics."""
        tensors, count = list(map(tf.convert_to_tensor, values)), len(values) - statistics
        with PropagatedErrors(self.communicator, "reduce"):
            for each in tensors:
                _refuse_strings("reduce", each)

        def call(*given: Any) -> list[Any]:
            arrays, is_empty = list(given[: len(tensors)]), any(given[len(tensors) :])
            out = self._results.like(arrays)
            if is_empty:
                arrays[:count] = zeros_for_nan(arrays[:count])
            totals = self.replication.all_reduce_arrays(arrays, op, options, out=out)
            if any(np.isnan(each).any() for each in totals[count:]):
                totals[count:] = sums_of_batches(self.replication, arrays[count:], is_empty)
            return totals

        # Most programs know it while they are traced: the operation needs no input for it.
        inputs = tensors if empty is False else [*tensors, tf.convert_to_tensor(empty)]
        return self.execute(call, inputs, [each.shape for each in tensors])

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
        self, tensors: Sequence[Any], others: Sequence[Any], rows: Any, of: Hashable, empty: Any
    ) -> list[Any]:
        """As `sums_by_rows`, but the tensors are compressed between nodes.

        rows: None for sums of the tensors as they are.
        of: as of `CompressedReducer.all_reduce_many`.
        empty: as of `reduce`.
        """
        assert self._compressed is not None
        compressed, count = self._compressed, len(tensors)

        def call(*given: Any) -> list[Any]:
            arrays, exact = list(given[:count]), list(given[count:])
            is_empty = empty is not False and bool(exact.pop())
            if is_empty:
                arrays = zeros_for_nan(arrays)
            totals = self.replication.all_reduce_arrays(exact, ReduceOp.SUM) if exact else []
            if rows is not None:
                all_rows = totals.pop()
                share = exact.pop() * self.communicator.size / max(1, all_rows)
                arrays = [weighted(each, share) for each in arrays]
            if any(np.isnan(each).any() for each in totals):
                totals = sums_of_batches(self.replication, exact, is_empty)
            return [*compressed.all_reduce_many(arrays, "sum", of=of), *totals]

        summed = [*tensors, *others]
        inputs = summed if rows is None else [*summed, rows]
        if empty is not False:
            inputs = [*inputs, tf.convert_to_tensor(empty)]
        return self.execute(call, inputs, [each.shape for each in summed])

    def _reduce_slices(self, slices: Sequence[Any], mean: bool) -> list[Any]:
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
        shape = value.shape
        with PropagatedErrors(self.communicator, "gather"):
            _refuse_strings("gather", value)
            if shape.rank is not None and not -shape.rank <= axis < shape.rank:
                raise ValueError(f"gather: no axis {axis} in a tensor of shape {shape}")
        if shape.rank is not None:
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

    def mirror(self, make: Callable[[], Any], what: str) -> Any:
        """The chief's value of a new variable; TypeError for strings.

        A MismatchError on every rank where shapes, dtypes or texts differ, or `make` fails on one.
        """
        if self.communicator.size == 1:
            return make()
        with PropagatedErrors(self.communicator, what):
            value = make()
            _refuse_strings(what, value)
        mirror = self.replication.mirror
        return self._execute_one(lambda own: mirror(np.array(own), what), value, value.shape)

    def _execute_one(self, call: Callable[[Any], Any], value: Any, shape: Any) -> Any:
        """Call a function of one array with a tensor; its result, of that shape."""
        return self.execute(lambda array: [call(array)], [value], [shape])[0]


def local_value(value: Any) -> Any:
    """This process's component of a value: a tensor or slices."""
    if isinstance(value, values.DistributedVariable):
        return value._primary.read_value()
    if isinstance(value, values.DistributedValues):
        value = value.values[0]
    if value is None:
        raise TypeError(NOTHING)
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise TypeError(
            f"a {type(value).__name__} can't be reduced or gathered: must be a tensor, such as of"
            " to_tensor() or tf.sparse.to_dense"
        )
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def op_of(given: Any) -> Any:
    """TensorFlow's ReduceOp, of one or of its name; ValueError for what is none."""
    return tf.distribute.ReduceOp(given.upper() if isinstance(given, str) else given)


def _is_dense_of_floats(value: Any) -> bool:
    if isinstance(value, tf.IndexedSlices):
        return False
    dtype = tf.convert_to_tensor(value).dtype
    return bool(dtype.is_floating or dtype.is_complex)


def _refuse_strings(call: str, tensor: Any) -> None:
    if tensor.dtype in (tf.string, tf.resource, tf.variant):
        raise TypeError(
            f"{call}: a tensor of dtype {tensor.dtype.name}: must be of numbers or bool. For"
            " strings, communicator.all_gather_object(tensor.numpy().tolist()) outside of a"
            " tf.function"
        )


def _divided(total: Any, count: int) -> Any:
    """The mean; floats for integers, as TensorFlow's is."""
    return tf.math.truediv(total, tf.cast(count, total.dtype))
