"""`compile` of Keras's TensorFlow backend: metrics have variables of the strategy, as models do.

A model that was made in a strategy's scope may be compiled outside of it, as with `tf.distribute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.model import Trainer
from tensorflow.python.distribute.values import DistributedVariable

from strategies.keras.training import Training


@cache
def install(
    prepare: Callable[[Any, Training], None], permit_training: Callable[[Any, Training], None]
) -> None:
    """Wrap Keras's method, once. The functions are those of `models`, which needs this module."""
    plain = Trainer.compile

    @wraps(plain)
    def compile(model: Any, *args: Any, **kwargs: Any) -> None:
        strategy = model._distribute_strategy
        # Only a strategy whose ranks step together has one.
        training = getattr(strategy, "__dict__", {}).get("keras_training")
        if training is None or tf.distribute.get_strategy() is strategy:
            plain(model, *args, **kwargs)
            return
        with strategy.scope():
            plain(model, *args, **kwargs)
        prepare(model, training)
        permit_training(model, training)

    Trainer.compile = compile


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
