"""Callbacks of Keras, by Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collectives.horovod.joining import Request, with_joined
from collectives.horovod.process_sets import ranks, size
from strategies.tensorflow.horovod.gradients import key_of
from strategies.tensorflow.horovod.movements import broadcast_variables
from strategies.tensorflow.horovod.optimizer import is_distributed


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Every rank begins with the root's weights and state of the optimizer.

    They are assigned before the first batch; where a layer isn't built by then, once more after it.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = ()) -> None:
        """local_variables: one or several that stay each rank's own."""
        super().__init__()
        self._root = root_rank
        one = isinstance(local_variables, keras.Variable | tf.Variable)
        self._local = [local_variables] if one else list(local_variables or ())
        self._done = False

    def register_local_var(self, var: Any) -> None:
        """Leave this variable as it is."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if there are variables.

        ValueError where Keras has wrapped a `DistributedOptimizer` for the scaling of losses.
        """
        inner = getattr(self.model.optimizer, "inner_optimizer", None)
        if inner is not None and is_distributed(inner):
            raise ValueError(
                "the optimizer scales losses around a DistributedOptimizer, and a rank whose"
                " gradients overflow would make no call: distribute a"
                " keras.optimizers.LossScaleOptimizer(optimizer)"
            )
        # A layer of a built model may not be: the first batch builds it, or doesn't use it.
        self._done = all(layer.built for layer in self.model._flatten_layers())
        if self._done and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        if self._done:
            self._broadcast(self.model.optimizer.variables)
        elif self.model.built:
            self._broadcast([])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast what was made in the first batch."""
        if not self._done:
            self._done = True
            self._broadcast(self.model.optimizer.variables)

    def _broadcast(self, state: Sequence[Any]) -> None:
        local = set(map(key_of, self._local))
        # Of random numbers every rank has its own.
        every = [*self.model.weights, *state]
        broadcast_variables([each for each in every if key_of(each) not in local], self._root)


class MetricAverageCallback(keras.callbacks.Callback):
    """The logs of an epoch are their averages over the ranks.

    It comes before callbacks that read them, such as `ReduceLROnPlateau` and `EarlyStopping`.
    """

    def __init__(self, device: str = "") -> None:
        """The device has no effect."""
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average them. A MismatchError on every rank where their names differ."""
        names = sorted(name for name, each in (logs or {}).items() if _is_number(each))
        comm, text = ranks(), f"metrics {', '.join(names)}"
        own = np.array([float(logs[name]) for name in names])
        average = with_joined(
            comm, Request(text), lambda: comm.all_reduce(own, "mean", what=text[:1000])
        )
        for name, each in zip(names, average.tolist(), strict=True):
            logs[name] = each


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (hasattr(value, "shape") and not len(value.shape))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """The learning rate is `initial_lr * multiplier(epoch)`.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch, or a number, of which the epoch's power is taken.
        start_epoch, end_epoch: the epochs in which it counts; the last one is not one of them.
        staircase: whether it changes by the epoch; otherwise by the batch, as a part of one.
        momentum_correction: no effect, as Keras compiles the momentum into the step.
        steps_per_epoch: batches in an epoch; by default those of `fit`.

    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """ValueError without an initial learning rate."""
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is None: must be a learning rate")
        self._initial, self._start, self._end = initial_lr, start_epoch, end_epoch
        self._staircase, self._steps, self._epoch = staircase, steps_per_epoch, 0
        if not callable(multiplier):
            base, multiplier = multiplier, lambda epoch: base ** (epoch - start_epoch)
        self._multiplier = multiplier

    def on_train_begin(self, logs: Any = None) -> None:
        """ValueError where the number of batches is unknown."""
        if not self._staircase:
            self._steps = self._steps or self.params.get("steps")
            if not self._steps:
                raise ValueError("steps_per_epoch: must be given where fit doesn't know it")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the learning rate of the epoch."""
        self._epoch = epoch
        if self._staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of the batch."""
        if self._steps and not self._staircase:
            self._set(self._epoch + batch / self._steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        if self._epoch >= self._start and (self._end is None or self._epoch < self._end):
            self.model.optimizer.learning_rate = self._initial * self._multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The learning rate grows to `initial_lr` from its part for one rank, batch by batch.

    Source: https://arxiv.org/abs/1706.02677, section 2.2. `initial_lr` is already multiplied by the
    number of ranks.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """verbose: whether rank 0 prints the learning rate at the end."""

        def multiplier(epoch: float) -> float:
            assert self._steps is not None
            # So that the last batch of an epoch has a round number.
            done = (epoch + 1 / self._steps) / warmup_epochs
            return (1 + done * (size() - 1)) / size()

        given = 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        super().__init__(initial_lr, multiplier, *given)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate, and print it after the last epoch of the growth."""
        super().on_epoch_end(epoch, logs)
        if self._end is not None and epoch == self._end - 1 and self._verbose and not ranks().rank:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
