"""`model_to_estimator`: an estimator of a compiled Keras model, or of a function that makes one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras

from strategies.estimator.estimator import Estimator
from strategies.estimator.specs import RunConfig, refuse


def model_to_estimator(
    keras_model: keras.Model | Callable[[], keras.Model] | None = None,
    *,
    keras_model_fn: Callable[[], keras.Model] | None = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
    **unsupported: Any,
) -> Estimator:
    """An estimator of a compiled Keras model, or of a function that returns one. Collective.

    A model is copied with its weights into the strategies' scopes; it does not change. A function,
    as either argument, is called in each scope: it is needed for models of the program's own class.

    Raises TypeError for anything else, ValueError for a model that is not compiled.
    """
    refuse("model_to_estimator", unsupported, "keras_model, keras_model_fn, model_dir, config")
    if (keras_model is None) == (keras_model_fn is None):
        raise ValueError("model_to_estimator: one of keras_model and keras_model_fn must be given")
    given = keras_model_fn if keras_model is None else keras_model
    if isinstance(given, keras.Model):
        return Estimator(_copies_of(given), model_dir, config)
    if not callable(given):
        raise TypeError(
            f"keras_model is a {type(given).__name__}: must be a Keras model, or a function"
            " that returns one"
        )
    return Estimator(given, model_dir, config)


def _copies_of(model: keras.Model) -> Callable[[], keras.Model]:
    compiled = model.get_compile_config() if model.compiled else None
    if not compiled:
        raise ValueError(f"the Keras model {model.name!r} is not compiled: call compile first")

    def copy() -> keras.Model:
        copied = keras.models.clone_model(model)
        copied.compile_from_config(compiled)
        copied.set_weights(model.get_weights())
        return copied

    return copy
