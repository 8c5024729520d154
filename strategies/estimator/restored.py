"""An estimator's Keras model in a strategy's scope, and the checkpoints that it is restored from.

A checkpoint of step 20 is called `model.ckpt-20`, as those of `tf.estimator`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from strategies.core.same_error import PropagatedErrors
from strategies.tensorflow import Strategy

NAME = "model.ckpt"


def step_of(path: str | None) -> int:
    """The number of steps of a checkpoint; 0 without one. ValueError for another name."""
    if path is None:
        return 0
    step = path.rpartition("-")[2]
    if not step.isdecimal():
        raise ValueError(f"the checkpoint {path!r} is not an estimator's: must end with -STEPS")
    return int(step)


class RestoredModel:
    """A model made in a scope, with its checkpoint."""

    def __init__(
        self, model_fn: Callable[[], keras.Model], scope: AbstractContextManager[Any]
    ) -> None:
        """Raise TypeError unless `model_fn` returns a compiled Keras model."""
        with scope:
            self.model = model_fn()
        if not isinstance(self.model, keras.Model) or not self.model.compiled:
            raise TypeError(
                f"model_fn returned {type(self.model).__name__}: must return a Keras model that"
                " it has compiled"
            )
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)
        # Keras counts those of an execution that the data end within as whole.
        self.model.steps_per_execution = 1
        self.user: object = None
        """Of several that restore other checkpoints in turn: the one that did it last."""

    def restore(self, path: str | None) -> None:
        """Restore a model that is built; nothing without a path.

        Raises AssertionError where the model is not the one that was saved.
        """
        if path is not None:
            status = self.checkpoint.restore(path)
            status.assert_existing_objects_matched()
            status.expect_partial()


class Restoration(keras.callbacks.Callback):
    """Restores a checkpoint when `fit` or `evaluate` has built the model."""

    def __init__(
        self,
        restored: RestoredModel,
        path: str | None,
        strategy: Strategy,
        *,
        chief_alone: bool = False,
    ) -> None:
        """`chief_alone`: where the variables are on servers.

        It saves without waiting for the other workers, and so may delete a file that they read.
        """
        super().__init__()
        self._restored, self._path, self._strategy = restored, path, strategy
        self._chief_alone = chief_alone

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore; an error of one rank is raised on all."""
        if self._chief_alone:
            self._strategy.chief_first(self._restore, f"Estimator: restoring {self._path}")
            return
        with PropagatedErrors(self._strategy.communicator, "Estimator: restoring", self._path):
            self._restore()

    on_test_begin = on_train_begin

    def _restore(self) -> None:
        self._restored.restore(self._path)


class Saving(keras.callbacks.Callback):
    """Saves a checkpoint every so many steps, on all ranks."""

    def __init__(
        self,
        manager: tf.train.CheckpointManager,
        first: int,
        end: int | None,
        every: int | None,
        saved: Callable[[], Any],
    ) -> None:
        """Training goes from the step `first` to `end`.

        `saved()` is called after each checkpoint.
        """
        super().__init__()
        self._manager, self._end, self._every, self._saved = manager, end, every, saved
        self._first = self._step = self._last = first

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step."""
        self._advance(self._first + batch + 1)

    def _advance(self, step: int) -> None:
        self._step = step
        if self._every is not None and self._step // self._every > self._last // self._every:
            self.save()

    def finish(self, strategy: Strategy) -> None:
        """Save the last step. Collective."""
        self.save()
        strategy.communicator.barrier("Estimator.train")

    def save(self) -> None:
        """Save, unless this step is saved already. Collective."""
        if self._step == self._last:
            return
        self._last = self._step
        self._manager.save(checkpoint_number=self._step)
        self._saved()


class SharedSaving(Saving):
    """Saves on the chief alone, of workers with parameter servers, whose steps it counts together.

    Ends training on each worker at the last step.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Read the number of all workers' steps."""
        step = int(self.model.optimizer.iterations.numpy())
        if self._end is not None and step >= self._end:
            self.model.stop_training = True
        if self.model.distribute_strategy.is_chief:
            self._advance(step)

    def finish(self, strategy: Strategy) -> None:
        """Save the last step on the chief; the other workers wait for it."""
        strategy.chief_first(self.save)
