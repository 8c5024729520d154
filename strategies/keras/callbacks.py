"""Callbacks of `fit` on several ranks: which of them run where, and what the ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import product
from typing import Any

import keras
import numpy as np
from keras.src.utils import is_default

from strategies.core.same_error import raise_on_all
from strategies.keras.state import (
    Starts,
    average_statistics,
    broadcast_state,
    copy_of,
    finish_step,
    has_lost_values,
    learning_rates,
    refuse_different_weights,
    refuse_lost_values,
    starts_of,
)
from strategies.keras.training import Training


def _present(*names: str) -> tuple[type[Any], ...]:
    """The callbacks of these names that this Keras has."""
    return tuple(getattr(keras.callbacks, name) for name in names if hasattr(keras.callbacks, name))


_SAVERS = _present("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint")
ON_CHIEF = (*_SAVERS, *_present("CSVLogger", "ProgbarLogger", "RemoteMonitor", "TensorBoard"))
"""Callbacks that write what is written once: `fit` runs them on the chief alone."""

_KEPT = (
    "set_model",
    *("on_train_begin", "on_train_end", "on_train_batch_begin", "on_train_batch_end"),
    *("on_epoch_begin", "on_epoch_end"),
    *("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end"),
)
"""Methods that the chief's callbacks run while the other ranks go on to a call."""

_BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def callbacks_of_rank(training: Training, callbacks: Any) -> list[Any]:
    """The callbacks that this rank runs: those that write on the chief alone, others everywhere."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    every = keras.tree.flatten(callbacks) if callbacks else []
    return [each for each in every if training.is_chief or not isinstance(each, ON_CHIEF)]


def callbacks_of_fit(
    training: Training, statistics: RunningStatistics, callbacks: Any
) -> list[Any]:
    """This rank's callbacks, between two that keep the ranks in step. Collective."""
    own = callbacks_of_rank(training, callbacks)
    acts = any(_acts_on_batches(each) for each in own)
    saves = training.reduces or any(isinstance(each, _SAVERS) for each in own)
    acts, saves = training.communicator.all_reduce(
        np.array([acts, saves], np.uint8), "max", what="fit: the kinds of its callbacks"
    )
    agreement = _BatchAgreement if acts else _EpochAgreement
    return [_Average(training, statistics, saves), *own, agreement(training, statistics)]


@contextmanager
def errors_kept(training: Training, callbacks: Sequence[Any]) -> Iterator[None]:
    """A context in which `_EpochAgreement` raises errors of the chief's callbacks, on all ranks.

    The other ranks, which do not run them, would wait for the chief.
    """
    # Once each, however often the program has given one.
    writers = list({id(each): each for each in callbacks if isinstance(each, ON_CHIEF)}.values())
    before = [vars(each).copy() for each in writers]
    for writer, name in product(writers, _KEPT):
        setattr(writer, name, _keeping(training, getattr(writer, name)))
    try:
        yield
    finally:
        training.chiefs_error = None
        for writer, own in zip(writers, before, strict=True):
            for name in _KEPT:
                delattr(writer, name)
                if name in own:
                    setattr(writer, name, own[name])


def _keeping(training: Training, method: Callable[..., Any]) -> Callable[..., None]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            training.chiefs_error = training.chiefs_error or error

    return call


def _acts_on_batches(callback: Any) -> bool:
    """Whether it may end training within an epoch, or communicate there."""
    if isinstance(callback, keras.callbacks.History):
        return False
    methods = [getattr(callback, name) for name in _BATCHES]
    if isinstance(callback, ON_CHIEF):
        # Keras's own neither stop nor communicate there; a class that is made of one may.
        methods = [each for each in methods if not str(each.__module__).startswith("keras.")]
    return any(not is_default(each) for each in methods)


_FAILED = 2
"""In place of a rank's wish to stop: a callback that runs on the chief alone has failed."""


class RunningStatistics:
    """Whether a model's moving statistics are the ranks' mean, or each rank's own.

    Under TensorFlow's LocalSGDStrategy its weights, too.
    """

    def __init__(self, training: Training, model: Any) -> None:
        self._training, self._model = training, model
        self._differ = False
        self._starts: Starts = {}

    def train(self) -> None:
        """Note that the ranks' statistics differ from now on."""
        if not self._differ and self._training.reduces:
            if has_lost_values(self._training, self._model):
                return  # the call is refused
            self._starts = starts_of(self._model)
        self._differ = True

    def average(self) -> None:
        """Make them equal, unless nothing was trained since. Collective.

        Within an epoch its further steps change them.
        """
        if self._differ and self._training.reduces:
            refuse_lost_values(self._training, self._model)
            average_statistics(self._training, self._model, self._starts)
        elif self._differ:
            self._training.owner.synchronize()
        self._differ = False
        if self._training.in_epoch:
            self.train()

    def broadcast(self, *, optimizers: bool = True) -> None:
        """Make the whole state the chief's. Collective."""
        broadcast_state(self._training, self._model, optimizers=optimizers)
        if self._differ and self._training.reduces:
            self._starts = starts_of(self._model)  # of a model that has just been built


class _Average(keras.callbacks.Callback):
    """Precedes the callbacks that save the model."""

    def __init__(self, training: Training, statistics: RunningStatistics, saves: bool) -> None:
        super().__init__()
        self._training, self._statistics, self._saves = training, statistics, saves

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note that the epoch's steps change the statistics."""
        self._statistics.train()
        self._training.in_epoch = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average them, where validation has not done it, and compare the weights."""
        if self._saves:
            self._statistics.average()
        if self._training.reduces:
            when = f"at the end of epoch {epoch}"
            refuse_different_weights(self._training, self._model, when)

    def on_train_end(self, logs: Any = None) -> None:
        """Average what the last epochs have changed."""
        self._statistics.average()


class _EpochAgreement(keras.callbacks.Callback):
    """Follows the other callbacks: what one of them decides on a rank holds on all ranks."""

    def __init__(self, training: Training, statistics: RunningStatistics) -> None:
        super().__init__()
        self._training, self._statistics = training, statistics

    def on_train_begin(self, logs: Any = None) -> None:
        """Make state and first epoch the chief's, which may have restored them from a backup."""
        self._raise_chiefs_error()
        self._statistics.broadcast()
        first = self._training.communicator.broadcast_object(self.model._initial_epoch)
        self.model._initial_epoch = first

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Use the chief's learning rates, and stop where a callback on any rank stops."""
        rates: Sequence[Any] = learning_rates(self.model)
        if rates:
            values = [float(copy_of(each)) for each in rates]
            chiefs = self._training.communicator.broadcast(np.array(values))
            for variable, own, value in zip(rates, values, chiefs, strict=True):
                if own != value:
                    variable.assign(float(value))
        self._agree_to_stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop where a callback on any rank stops."""
        self._agree_to_stop()

    def on_train_end(self, logs: Any = None) -> None:
        """Raise what the chief's callbacks have raised at the end."""
        self._raise_chiefs_error()

    def _agree_to_stop(self) -> None:
        # Not by the property, which copies the whole state in JAX.
        model = self._model
        failed = self._training.chiefs_error is not None
        stops = np.array([_FAILED if failed else bool(model.stop_training)], np.uint8)
        what = "fit: whether a callback has set stop_training"
        stops = self._training.communicator.all_reduce(stops, "max", what=what)
        if stops[0] == _FAILED:
            self._raise_chiefs_error()
        model.stop_training = bool(stops[0])

    def _raise_chiefs_error(self) -> None:
        """Raise what a callback that the chief alone runs has raised there. Collective."""
        error, self._training.chiefs_error = self._training.chiefs_error, None
        raise_on_all(self._training.communicator, "fit's callbacks of the chief alone", error)


class _BatchAgreement(_EpochAgreement):
    """The same after every step, for callbacks that may stop there."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop where a callback on any rank stops."""
        finish_step(logs)
        self._agree_to_stop()
