"""The scope in which `compile` makes a model train on all ranks in step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras

from strategies.foreign.methods import wrap_method
from strategies.keras.models import permit_training, prepare
from strategies.keras.training import Training
from strategies.replication.replication import Replication


@contextmanager
def scope_with_keras(strategy: Replication, scope: AbstractContextManager[None]) -> Iterator[None]:
    """A strategy's scope, in which `compile` prepares models for its ranks."""
    with scope, training_scope(Training(strategy)):
        yield


@contextmanager
def training_scope(training: Training) -> Iterator[None]:
    """A context in which this thread's `model.compile` prepares the model for the ranks."""
    thread, compiled = threading.get_ident(), []

    def compile(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        if threading.get_ident() == thread:
            prepare(model, training)
            compiled.append(model)
        return result

    undo = wrap_method(keras.Model, "compile", compile)
    try:
        yield
    finally:
        undo()
        # Now, since layers may have been added or built after `compile`.
        for model in compiled:
            permit_training(model, training)
