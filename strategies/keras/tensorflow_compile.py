"""`compile` of Keras's TensorFlow backend, for a model that was made in a strategy's scope.

It may be called outside of the scope, as with `tf.distribute`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from strategies.foreign.methods import wrap_method
from strategies.keras.models import permit_training, prepare
from strategies.keras.tensorflow_predictions import training_of


@cache
def install() -> None:
    """Wrap Keras's method, once."""
    wrap_method(keras.Model, "compile", _compile)


def _compile(plain: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    training = training_of(model)
    # Models of Keras's other backends have none.
    strategy: Any = getattr(model, "_distribute_strategy", None)
    made_here = hasattr(strategy, "array_strategy")
    if not made_here or tf.distribute.get_strategy() is strategy:
        plain(model, *args, **kwargs)
        return
    with strategy.scope():
        plain(model, *args, **kwargs)
    if training is not None:
        prepare(model, training)
        permit_training(model, training)
