"""`tf.train.Checkpoint` and CheckpointManager with one writer, the chief.

All ranks call `save`, since variables with a value of each rank's own are aggregated by it. The
chief writes; the others write to a temporary folder that is deleted at once. Every rank returns the
chief's path, when the file is complete. A failure of the chief's is raised on all ranks.

Keras's `save`, `save_weights` and `export`, and `tf.saved_model.save`, are called by all ranks,
too, and write once. Callbacks of `fit` that Keras runs on the chief alone write there as they are.

Checkpoints and models that contain no variable of such a strategy are saved as before.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as checkpoint_lib
from tensorflow.python.checkpoint import checkpoint_management, trackable_view
from tensorflow.python.saved_model import save as saved_model

from collectives import Communicator
from strategies.core.same_error import call_on_all
from strategies.tensorflow.variables import callers


class _State(threading.local):
    """What this thread is doing."""

    silent = False
    """Whether it records a checkpoint that another rank has written."""
    saves = False
    """Whether a model is being saved, by functions that call each other."""


_state = _State()


def _strategy_of(checkpoint: Any) -> Any:
    """That whose variables the checkpoint contains, if it has several ranks, or else None."""
    for thing in trackable_view.TrackableView(checkpoint).descendants():
        # An attribute that TensorFlow's distributed values lack is read of the aggregate.
        holds = not isinstance(thing, tf.distribute.DistributedValues) and hasattr(thing, "_value")
        variable = getattr(thing, "value", thing) if holds else thing
        strategy = getattr(variable, "_distribute_strategy", None)
        communicator = getattr(strategy, "communicator", None)
        if isinstance(communicator, Communicator) and communicator.size > 1:
            return strategy
    return None


def _made_equal(strategy: Any, what: str) -> Communicator:
    """The strategy's communicator, once all ranks save, and their variables are equal."""
    communicator: Communicator = strategy.communicator
    communicator.barrier(f"{what}: all ranks call it")
    strategy.synchronize()
    return communicator


@contextmanager
def _silent() -> Iterator[None]:
    _state.silent = True
    try:
        yield
    finally:
        _state.silent = False


def _by_one_writer(plain: Callable[..., str]) -> Callable[..., str]:
    """`Checkpoint._write`, which `write`, `save` and the manager call, on all ranks."""

    @wraps(plain)
    def write(self: Any, file_prefix: Any, options: Any = None) -> str:
        strategy = _strategy_of(self) if tf.executing_eagerly() else None
        if strategy is None:
            return plain(self, file_prefix, options)
        what = "Checkpoint.save, write or CheckpointManager.save"
        communicator = _made_equal(strategy, what)
        chief = communicator.rank == 0

        def write_one() -> str:
            if chief:
                return plain(self, file_prefix, options)
            _write_aside(plain, self, options)
            return ""

        written = call_on_all(communicator, "writing a checkpoint", write_one)
        path = str(communicator.broadcast_object(written))
        callbacks = getattr(options, "experimental_write_callbacks", None)
        if callbacks and not chief:
            with _silent():
                checkpoint_lib._execute_callbacks(callbacks, path)
        return path

    return write


def _synchronously(plain: Callable[..., str]) -> Callable[..., str]:
    """Without TensorFlow's thread, whose collective calls would be beside the program's."""

    @wraps(plain)
    def write(self: Any, file_prefix: Any, options: Any = None) -> str:
        if getattr(options, "enable_async", False) and _strategy_of(self) is not None:
            options = copy.copy(options)
            options.enable_async = options.experimental_enable_async_checkpoint = False
        return plain(self, file_prefix, options)

    return write


def _write_aside(plain: Callable[..., str], checkpoint: Any, options: Any) -> None:
    """Write to a temporary folder: the reads of variables are collective."""
    without = copy.copy(options) if options else tf.train.CheckpointOptions()
    without.experimental_write_callbacks = None
    with tempfile.TemporaryDirectory() as folder:
        plain(checkpoint, os.path.join(folder, "aside"), without)


def _once(plain: Callable[..., Any], path_name: str, what: str) -> Callable[..., Any]:
    """A function of Keras or TensorFlow that writes a model, on all ranks: the chief's is kept."""
    signature = inspect.signature(plain)

    @wraps(plain)
    def save(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        model = next(iter(given.arguments.values()))
        strategy = None
        if not _state.saves and tf.executing_eagerly() and not _on_chief_alone():
            strategy = _strategy_of(model)
        if strategy is None:
            return plain(*args, **kwargs)
        communicator = _made_equal(strategy, what)

        def save_one() -> Any:
            if communicator.rank == 0:
                return plain(*args, **kwargs)
            name = os.path.basename(os.path.normpath(os.fspath(given.arguments[path_name])))
            with tempfile.TemporaryDirectory() as folder:
                given.arguments[path_name] = os.path.join(folder, name)
                plain(*given.args, **given.kwargs)
            return None

        _state.saves = True
        try:
            return call_on_all(communicator, what, save_one)
        finally:
            _state.saves = False

    return save


def _on_chief_alone() -> bool:
    """Whether a callback that `fit` runs on the chief alone is on the stack of calls."""
    if "keras" not in sys.modules:
        return False
    from strategies.keras.callbacks import ON_CHIEF

    return any(isinstance(frame.f_locals.get("self"), ON_CHIEF) for frame in callers())


@cache
def install_for_keras() -> None:
    """Wrap the functions that write models of Keras, once."""
    import keras
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib

    for name in ("save", "save_weights", "export"):
        setattr(keras.Model, name, _once(getattr(keras.Model, name), "filepath", f"Model.{name}"))
    # By which `keras.saving` writes.
    for module, name in (
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (legacy_h5_format, "save_model_to_hdf5"),
    ):
        setattr(module, name, _once(getattr(module, name), "filepath", f"keras.saving, {name}"))


def _unless_silent(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def act(*args: Any, **kwargs: Any) -> Any:
        return None if _state.silent else plain(*args, **kwargs)

    return act


@cache
def install() -> None:
    """Wrap TensorFlow's functions that write checkpoints, once."""
    plain = saved_model.save_and_return_nodes
    saved_model.save_and_return_nodes = _once(plain, "export_dir", "tf.saved_model.save")
    kind = checkpoint_lib.Checkpoint
    kind.save = _synchronously(kind.save)
    kind._write = _synchronously(_by_one_writer(kind._write))
    for name in ("update_checkpoint_state_internal", "_delete_file_if_exists"):
        setattr(checkpoint_management, name, _unless_silent(getattr(checkpoint_management, name)))
