"""Steps of Keras's TensorFlow backend on a replica's piece of a batch, which may have no rows.

With no rows a step runs on a row of zeros, whose gradients, metrics and statistics are discarded.
The number of rows is a tensor: it may differ at each execution of the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

from strategies.keras.state import metric_results, statistics_of
from strategies.keras.tensorflow_gradients import Step
from strategies.keras.training import Training

Method = Callable[..., Any]


class StepMethods:
    """Replacements of the model's steps, and of what Keras computes from their results."""

    def __init__(self, model: Any, training: Training) -> None:
        self._model, self._training = model, training
        self._kind = type(model)

    def methods(self) -> dict[str, Method]:
        """The replacements by name."""
        names = ["train_step", "test_step", "compute_loss", "_maybe_symbolic_build"]
        names.append("_get_metrics_result_or_logs")
        return {name: getattr(self, name) for name in names}

    def train_step(self, data: Any) -> Any:
        """The model's step, of which gradients are weighted by rows."""
        rows, empty, filled = with_a_row(data)
        if rows is None:
            return self._kind.train_step(self._model, data)
        step = Step(rows)
        if empty is not None:
            kept = [each for each in statistics_of(self._model) if _is_float(each)]
            step.statistics = [(each.value, tf.identity(each.value)) for each in kept]
        before, self._training.step = self._training.step, step
        try:
            return self._counted(self._kind.train_step, rows, empty, filled)
        finally:
            self._training.step = before

    def test_step(self, data: Any) -> Any:
        """The model's step."""
        rows, empty, filled = with_a_row(data)
        if rows is None:
            return self._kind.test_step(self._model, data)
        return self._counted(self._kind.test_step, rows, empty, filled)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The model's loss."""
        if self._training.step is not None:
            self._training.step.by_rows = not has_sums(self._model)
        return self._kind.compute_loss(self._model, *args, **kwargs)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """The logs of the last step, with the metrics among them over all steps of all replicas."""
        found = self._kind._get_metrics_result_or_logs(self._model, logs)
        if found is not logs or not logs:
            return found
        metrics = metric_results(self._model)
        return {name: metrics.get(name, number) for name, number in logs.items()}

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Build the model by the shapes of pieces; of one row for a piece without rows.

        Without reading one: data of a generator or of worker threads can't begin again.
        """
        strategy = self._model._distribute_strategy
        if strategy is None:
            return
        if iterator is not None:
            spec = iterator._distributed_dataset.element_spec
            data_batch = tf.nest.map_structure(_symbol, spec)
        with strategy.scope():
            self._model._symbolic_build(data_batch=data_batch)

    def _counted(self, method: Method, rows: Any, empty: Any, data: Any) -> Any:
        """The step's logs. Metrics stay as they were where there are no rows."""
        variables = self._model.metrics_variables if empty is not None else []
        values = [tf.identity(each.value) for each in variables]
        logs = method(self._model, data)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(tf.where(empty, value, tf.identity(variable.value)))
        found = self._model.get_metrics_result()
        return found if found.keys() == logs.keys() else _averaged(logs, rows)


def has_sums(model: Any) -> bool:
    """Whether losses are sums over rows. ValueError where some are, and others are means."""
    losses = keras.tree.flatten(model.loss) if model.loss is not None else []
    reductions = [getattr(each, "reduction", "sum_over_batch_size") for each in losses if each]
    sums = [each in ("sum", "none", None) for each in reductions]
    if any(sums) and not all(sums):
        raise ValueError(
            f"losses have reductions {reductions}: must all be sums or all be means, since"
            " gradients of means count by the rows of each replica"
        )
    return any(sums)


def with_a_row(data: Any) -> tuple[Any, Any, Any]:
    """The number of rows, whether there are none, and data with a row of zeros in that case.

    The second is None where the graph has a constant number of rows, and the first where data
    contain no tensor.
    """
    leaves = [each for each in keras.tree.flatten(data) if _is_batch(each)]
    if not leaves:
        return None, None, data
    rows = tf.shape(leaves[0])[0]
    if leaves[0].shape[0]:
        return rows, None, data
    empty = tf.equal(rows, 0)

    def zeros() -> list[Any]:
        shapes = [tf.concat([[1], tf.shape(each)[1:]], 0) for each in leaves]
        return [tf.zeros(shape, each.dtype) for shape, each in zip(shapes, leaves, strict=True)]

    filled = tf.cond(empty, zeros, lambda: [tf.identity(each) for each in leaves])
    for new, old in zip(filled, leaves, strict=True):
        if not tf.executing_eagerly():
            new.set_shape([None, *old.shape[1:]])
    rest = iter(filled)
    return (
        rows,
        empty,
        keras.tree.map_structure(lambda each: next(rest) if _is_batch(each) else each, data),
    )


def _averaged(logs: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    """The mean over the replicas of logs that are not Keras's metrics, weighted by rows."""
    weight = tf.cast(rows, tf.float32)
    numbers = tf.nest.flatten(logs)  # those of Keras's CompileMetrics are a dictionary
    values = [tf.math.multiply_no_nan(tf.cast(each, tf.float32), weight) for each in numbers]
    replica = tf.distribute.get_replica_context()
    *sums, total = replica.all_reduce("SUM", [*values, weight])
    means: dict[str, Any] = tf.nest.pack_sequence_as(logs, [each / total for each in sums])
    return means


def _is_float(variable: Any) -> bool:
    return bool(keras.backend.is_float_dtype(variable.dtype))


def _is_batch(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank)


def _symbol(spec: Any) -> Any:
    """The symbolic tensor of a piece's part; of one row if it has none. None stays None."""
    own = getattr(spec, "_value_specs", (spec,))[0]  # of this process's replica
    if not hasattr(own, "dtype"):
        return None
    shape = own.shape if own.shape.rank is not None else tf.TensorShape([])
    rows = [None if length is None else max(length, 1) for length in shape[:1]]
    return keras.KerasTensor((*rows, *shape[1:]), keras.backend.standardize_dtype(own.dtype))


def refuse_metrics_of_others(model: Any, training: Training) -> None:
    """ValueError for a metric whose variables each rank would have for itself."""
    for metric in _metrics_of(model):
        for variable in metric.variables:
            if not isinstance(variable.value, DistributedVariable):
                raise ValueError(
                    f"metric {metric.name!r} was made outside of the scope of"
                    f" {type(training.owner).__name__}: it must be made there, as the model"
                )


def _metrics_of(model: Any) -> Iterator[Any]:
    """The model's metrics, and those that were given to `compile`."""
    yield from model._metrics
    for layer in model._flatten_layers(include_self=False):
        yield from layer._metrics
    compiled = model._compile_metrics
    if compiled is not None:
        given = compiled._user_metrics, compiled._user_weighted_metrics
        for each in keras.tree.flatten(given):
            if isinstance(each, keras.metrics.Metric):
                yield each
