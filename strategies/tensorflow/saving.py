"""`tf.train.Checkpoint` and CheckpointManager with one writer, the chief.

All ranks call `save`, since variables with a value of each rank's own are aggregated by it. The
chief writes; the others write to a temporary folder that is deleted at once. Every rank returns the
chief's path, when the file is complete. A failure of the chief's is raised on all ranks.

Checkpoints that contain no variable of such a strategy are saved as before.
"""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as checkpoint_lib
from tensorflow.python.checkpoint import checkpoint_management, trackable_view

from collectives import Communicator
from strategies.core.same_error import raise_on_all


class _State(threading.local):
    """Whether this thread records a checkpoint that another rank has written."""

    silent = False


_state = _State()


def _communicator_of(checkpoint: Any) -> Communicator | None:
    """That of the strategy whose variables the checkpoint contains; None without one."""
    for thing in trackable_view.TrackableView(checkpoint).descendants():
        variable = getattr(thing, "value", thing) if hasattr(thing, "_value") else thing
        strategy = getattr(variable, "_distribute_strategy", None)
        communicator = getattr(strategy, "communicator", None)
        if isinstance(communicator, Communicator) and communicator.size > 1:
            return communicator
    return None


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
        communicator = _communicator_of(self) if tf.executing_eagerly() else None
        if communicator is None:
            return plain(self, file_prefix, options)
        chief, path, failure = communicator.rank == 0, "", None
        try:
            if chief:
                path = plain(self, file_prefix, options)
            else:
                _write_aside(plain, self, options)
        except Exception as error:
            failure = error
        raise_on_all(communicator, "writing a checkpoint", failure)
        path = str(communicator.broadcast_object(path))
        if not chief:
            with _silent():
                for callback in getattr(options, "experimental_write_callbacks", None) or ():
                    callback(path)
        return path

    return write


def _write_aside(plain: Callable[..., str], checkpoint: Any, options: Any) -> None:
    """Write to a temporary folder: the reads of variables are collective."""
    without = copy.copy(options) if options else tf.train.CheckpointOptions()
    without.experimental_write_callbacks = None
    with tempfile.TemporaryDirectory() as folder:
        plain(checkpoint, os.path.join(folder, "aside"), without)


def _unless_silent(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def act(*args: Any, **kwargs: Any) -> Any:
        return None if _state.silent else plain(*args, **kwargs)

    return act


_installed = False


def install() -> None:
    """Wrap TensorFlow's functions that write checkpoints, once."""
    global _installed
    if _installed:
        return
    _installed = True
    kind = checkpoint_lib.Checkpoint
    kind._write = _by_one_writer(kind._write)
    for name in ("update_checkpoint_state_internal", "_delete_file_if_exists"):
        setattr(checkpoint_management, name, _unless_silent(getattr(checkpoint_management, name)))
