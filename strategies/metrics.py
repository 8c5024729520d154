"""Metrics over many batches and all replicas, as `tf.keras.metrics`.

The state is in variables that are aggregated when they are read (ON_READ, SUM): inside `run` each
replica updates its own without communication, and `result()` outside of `run` sums those of all
replicas and returns the same number on every rank. So that call is collective. A metric made
outside of every scope belongs to its process; it raises RuntimeError where it is updated inside a
`run` of several replicas.

Sums are kept as float64 whatever the metric's dtype, to which only the result is rounded: Keras,
which counts in float32, stops counting at 16,777,216.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from collectives.scope import named_scope
from strategies.core.values import Array, as_array
from strategies.replication.losses import broadcast_weights
from strategies.variables.variable import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    compare_made,
    made_together,
)


class Metric(ABC):
    """Base of the metrics. Made in a strategy's scope, which is collective, or outside of all.

    name: any text, None for the class's own; dtype: that of results, float32 as in Keras.
    """

    def __init__(self, name: str | None = None, dtype: Any = np.float32) -> None:
        self.name = type(self).__name__.lower() if name is None else name
        with made_together(f"metric {self.name!r}"):
            self.dtype = np.dtype(dtype)
        compare_made(f"metric {self.name!r}, {type(self).__name__} of {self.dtype}")
        self.total = self._sum("total")

    def _sum(self, what: str) -> Variable:
        return Variable(
            np.zeros((), np.float64),
            trainable=False,
            name=f"{self.name}/{what}",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    @property
    def variables(self) -> list[Variable]:
        """The state: float64 scalars, ON_READ."""
        return [self.total]

    @abstractmethod
    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add one batch. Under a strategy only inside `run`, else ValueError."""

    def result(self) -> Any:
        """The number so far, a scalar of the metric's dtype. Outside of `run` collective."""
        communicator = self.total.strategy.communicator
        with named_scope(communicator, f"metric {self.name!r}"), np.errstate(over="ignore"):
            return self.dtype.type(self._value())

    @abstractmethod
    def _value(self) -> Any:
        """The result as float64."""

    def reset_state(self) -> None:
        """Set all sums to zero."""
        for variable in self.variables:
            variable.assign(0.0)

    def reset_states(self) -> None:
        """As `reset_state`; Keras's older name for it."""
        self.reset_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`update_state`, then `result`."""
        self.update_state(*args, **kwargs)
        return self.result()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class Sum(Metric):
    """The sum of all values, each times its weight."""

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values of any shape; weights as in `Mean`. Empty batches change nothing."""
        array = as_array(values, "values", np.float64)
        if sample_weight is not None:
            array = array * broadcast_weights(sample_weight, array)
        self.total.assign_add(array.sum())

    def _value(self) -> Any:
        return self.total.read_value()


class _Average(Metric):
    """Base of weighted means over samples."""

    def __init__(self, name: str | None = None, dtype: Any = np.float32) -> None:
        super().__init__(name, dtype)
        self.count = self._sum("count")

    @property
    def variables(self) -> list[Variable]:
        """The weighted sum of the values, and the sum of the weights: float64 scalars, ON_READ."""
        return [self.total, self.count]

    def _add(self, values: Any, sample_weight: Any) -> None:
        array = as_array(values, "values", np.float64)
        if array.size and sample_weight is not None and not np.ndim(sample_weight):
            array = array.mean()
        weights = broadcast_weights(1.0 if sample_weight is None else sample_weight, array)
        if array.size:
            self.total.assign_add(_mean_of_samples(array * weights).sum())
            self.count.assign_add(_mean_of_samples(weights).sum())

    def _value(self) -> Any:
        total, count = self.total.read_value(), self.count.read_value()
        return total / count if count else 0.0


def _mean_of_samples(array: Array) -> Array:
    return np.asarray(array.mean(axis=tuple(range(1, array.ndim))))


class Mean(_Average):
    """The weighted mean of all values; 0 without values, and where the weights sum to zero."""

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add a number, or an array whose first axis is the samples.

        A sample of more axes counts once, with its mean, as in Keras 3. `sample_weight` is one for
        each sample or value; a single number is, as in Keras 3, the weight of the whole batch,
        which then counts once, with its mean. ValueError where it doesn't fit. Empty batches
        change nothing.
        """
        self._add(values, sample_weight)


class Accuracy(_Average):
    """How often predictions equal labels."""

    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> None:
        """Compare arrays of one shape, (n,) or (n, …), up to a last axis of length 1.

        Raises ValueError for other shapes. Weights as in `Mean`.
        """
        given = as_array(labels, "labels"), as_array(predictions, "predictions")
        true, predicted = _of_one_shape(*given)
        self._add(true == predicted, sample_weight)


class SparseCategoricalAccuracy(_Average):
    """How often the largest of the predictions is at the label's index."""

    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> None:
        """Add integer labels (n,) or (n, 1), and logits or probabilities (n, classes).

        Axes between are allowed in both. Of equal predictions the first counts. Raises ValueError
        for other shapes. Weights as in `Mean`.
        """
        scores = as_array(predictions, "predictions")
        if not scores.ndim or not scores.shape[-1]:
            raise ValueError(f"predictions have shape {scores.shape}: must end with the classes")
        true, predicted = _of_one_shape(as_array(labels, "labels"), scores.argmax(axis=-1))
        self._add(true == predicted, sample_weight)


def _of_one_shape(labels: Array, predictions: Array) -> tuple[Array, Array]:
    given = labels.shape, predictions.shape
    if labels.ndim == predictions.ndim + 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    elif predictions.ndim == labels.ndim + 1 and predictions.shape[-1] == 1:
        predictions = predictions[..., 0]
    if labels.shape != predictions.shape:
        raise ValueError(f"labels and predictions have shapes {given[0]} and {given[1]}: don't fit")
    return labels, predictions
