"""The linear estimator of numeric features."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras

from strategies.estimator.estimator import Estimator
from strategies.estimator.specs import RunConfig, refuse

_LEARNING_RATE = 0.2
"""That of TensorFlow's linear estimators, for an optimizer that is given by name."""


class LinearRegressor(Estimator):
    """As `tf.estimator.LinearRegressor`: the mean squared error of a linear function.

    The features are a dictionary of the columns' keys. `evaluate` returns `loss`, `average_loss`,
    `label/mean` and `prediction/mean`; `predict` returns `predictions`.
    """

    def __init__(
        self,
        feature_columns: Sequence[Any],
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        **unsupported: Any,
    ) -> None:
        """`feature_columns` are `tf.feature_column.numeric_column`s. Collective.

        optimizer: the name of a Keras optimizer, which has the learning rate 0.2, or an optimizer.
        Weights begin at 0. Raises TypeError for columns of another kind.
        """
        allowed = "feature_columns, model_dir, label_dimension, optimizer, config"
        refuse("LinearRegressor", unsupported, allowed)
        for column in feature_columns:
            _check(column)
        super().__init__(
            lambda: _linear(feature_columns, label_dimension, optimizer), model_dir, config
        )


def _check(column: Any) -> None:
    if type(column).__name__ != "NumericColumn" or column.normalizer_fn is not None:
        raise TypeError(
            f"feature_columns contains {column!r}: must be numeric_column without normalizer_fn;"
            " use Keras's preprocessing layers and model_to_estimator"
        )


def _linear(columns: Sequence[Any], dimension: int, optimizer: Any) -> keras.Model:
    inputs = {each.key: keras.Input(each.shape, name=each.key) for each in columns}
    flat = [keras.layers.Flatten()(each) for each in inputs.values()]
    joined = flat[0] if len(flat) == 1 else keras.layers.Concatenate()(flat)
    dense = keras.layers.Dense(dimension, kernel_initializer="zeros", name="predictions")
    model = keras.Model(inputs, dense(joined))
    mean_of = keras.metrics.MeanMetricWrapper
    metrics = [
        keras.metrics.MeanSquaredError(name="average_loss"),
        mean_of(lambda labels, predictions: labels, name="label/mean"),
        mean_of(lambda labels, predictions: predictions, name="prediction/mean"),
    ]
    model.compile(_new(optimizer), "mse", metrics=metrics)
    return model


def _new(given: Any) -> keras.optimizers.Optimizer:
    """An optimizer of this model alone."""
    if isinstance(given, str):
        optimizer = keras.optimizers.get(given)
        optimizer.learning_rate = _LEARNING_RATE
        return optimizer
    return keras.optimizers.deserialize(keras.optimizers.serialize(given))
