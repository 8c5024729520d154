"""`compile` of Keras's TensorFlow backend, for a model that was made in a strategy's scope.

It may be called outside of the scope, as with `tf.distribute`.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import keras
import tensorflow as tf

from strategies.keras.models import permit_training, prepare
from strategies.keras.tensorflow_predictions import training_of


@cache
def install() -> None:
    """Wrap Keras's method, once.

    That of the class which defines it, whose name differs between versions: Keras does not compile
    a model that it loads if the method is another one.
    """
    trainer: Any = next(each for each in keras.Model.__mro__ if "compile" in vars(each))
    plain = trainer.compile

    @wraps(plain)
    def compile(model: Any, *args: Any, **kwargs: Any) -> None:
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

    trainer.compile = compile
