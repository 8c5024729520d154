"""`predict` of Keras's TensorFlow backend: the rows of all replicas, in their order, on every rank.

Keras itself divides the rows, since the model has a strategy of `tf.distribute`, and returns those
of one process. So its method is wrapped, also for models that are not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import keras
import tensorflow as tf

from strategies.foreign.methods import wrap_method
from strategies.keras.loops import LoopMethods
from strategies.keras.tensorflow_steps import with_a_row
from strategies.keras.training import Training

PREDICTIONS = "_predictions"
"""The attribute of a model."""


class Predictions:
    """The predictions of one model."""

    def __init__(self, model: Any, loops: LoopMethods) -> None:
        self._model, self._loops = model, loops
        self._function: Any = None

    def all_rows(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What Keras's method returns for the rows of all ranks. Collective."""
        given = self._loops.of_prediction(args, kwargs)
        with self._joining():
            return plain(self._model, **given)

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """A context with a step and a function of its own: `predict_on_batch` takes own rows.

        The function is kept, so that it is traced once.
        """
        model = self._model
        own, step = vars(model).get("predict_step"), model.predict_step
        function, model.predict_function = model.predict_function, self._function
        object.__setattr__(model, "predict_step", lambda data: _joined(step, data))
        try:
            yield
        finally:
            object.__delattr__(model, "predict_step")
            if own is not None:
                object.__setattr__(model, "predict_step", own)
            self._function, model.predict_function = model.predict_function, function


def _in_order(source: Any) -> Any:
    """A dataset whose batches are split, though it reads files: their rows' order would change."""
    if not isinstance(source, tf.data.Dataset):
        return source
    policies, options = tf.data.experimental.AutoShardPolicy, tf.data.Options()
    given = source.options().experimental_distribute.auto_shard_policy
    if given not in (policies.AUTO, policies.FILE):
        return source
    options.experimental_distribute.auto_shard_policy = policies.DATA
    return source.with_options(options)


def _joined(step: Callable[..., Any], data: Any) -> Any:
    """The step's outputs for the rows of all replicas, of which some may have none."""
    rows, empty, given = with_a_row(data)
    outputs = step(given)
    if empty is not None:
        outputs = keras.tree.map_structure(lambda each: each[:rows], outputs)
    # Of all ranks, also under LocalSGDStrategy.
    gather = partial(tf.distribute.get_strategy().extended.operations.gather, axis=0)
    return keras.tree.map_structure(gather, outputs)


def training_of(model: Any) -> Training | None:
    """What the model trains by, if its strategy is one whose ranks step together."""
    own = getattr(getattr(model, "_distribute_strategy", None), "__dict__", {})
    training: Training | None = own.get("keras_training")
    return training


@cache
def install() -> None:
    """Wrap Keras's method, once."""
    wrap_method(keras.Model, "predict", predict)


def predict(plain: Callable[..., Any], model: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Keras's `predict`, `plain`; of a model that was made in a strategy's scope, of all rows."""
    training = training_of(model)
    if training is None:
        return plain(model, x, *args, **kwargs)
    predictions = vars(model).get(PREDICTIONS)
    if predictions is None:
        predictions = Predictions(model, LoopMethods(model, training))
        object.__setattr__(model, PREDICTIONS, predictions)
    return predictions.all_rows(plain, (_in_order(x), *args), kwargs)
