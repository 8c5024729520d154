"""Variables of replicas that are processes: one local value each, kept equal by collectives.

The classes are TensorFlow's. What differs from them follows `strategies.variables`: a variable
without aggregation cannot be assigned in a replica, and ONLY_FIRST_REPLICA is the first rank's
value on every rank. Keras marks none of its variables, so these are treated by what Keras assigns
in a replica: counters, seeds and constrained weights, which are equal on all ranks by themselves,
and running statistics, which are averaged (`statistics`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, distribute_utils, values
from tensorflow.python.trackable import base as trackable

_KERAS = "keras.src.backend.tensorflow.core"
_FRAMES = 24


class ReplicatedVariable(values.MirroredVariable):  # type: ignore[misc]
    """A variable that has the same value on every rank."""

    of_keras = False
    """Whether a variable of Keras 3 holds it."""

    is_statistic = False
    """Whether replicas have assigned values of their own, which are averaged."""

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        aggregation = self._aggregation
        none = aggregation == tf.VariableAggregation.NONE
        if self.of_keras and (none or aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA):
            updated = update_fn(self._primary, value, **kwargs)
            if none and self.dtype.is_floating and not self.trainable:
                self.is_statistic = True
                self._distribute_strategy.extended.statistic_changed(self)
            return updated
        if none:
            raise ValueError(
                f"variable {self.name!r} has aggregation NONE and cannot be assigned inside of run,"
                " where replicas could assign different values: create it with aggregation=tf."
                "VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or assign it outside of run"
            )
        return super()._update_replica(update_fn, value, **kwargs)


class LocalVariable(values.SyncOnReadVariable):  # type: ignore[misc]
    """A variable of which each rank has its own value, aggregated when read outside of run."""

    def value(self) -> Any:
        """The aggregate outside of run, and this rank's value inside."""
        if self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
                if tf.distribute.in_cross_replica_context():
                    return self._get_cross_replica()
        return super().value()

    def _get_cross_replica(self) -> Any:
        if self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            extended = self._distribute_strategy.extended
            return extended.broadcast_to(self._primary.read_value(), self._primary.device)
        return super()._get_cross_replica()


_CLASSES = {
    tf.VariableSynchronization.ON_WRITE: ReplicatedVariable,
    tf.VariableSynchronization.ON_READ: LocalVariable,
}


def create(
    strategy: Any,
    device: str,
    mirror: Callable[[Any], Any],
    next_creator: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    """A variable with the chief's initial value, as TensorFlow's MirroredStrategy creates one."""

    def create_one(**arguments: Any) -> list[Any]:
        initial, dtype = arguments["initial_value"], arguments.get("dtype")
        arguments["initial_value"] = lambda: mirror(_evaluated(initial, dtype))
        with tf.device(device):
            return [next_creator(**arguments)]

    variable = distribute_utils.create_mirrored_variable(
        strategy, create_one, _CLASSES, distribute_utils.VARIABLE_POLICY_MAPPING, **kwargs
    )
    variable.of_keras = _called_by_keras()
    return variable


def _evaluated(initial: Any, dtype: Any) -> Any:
    value = initial() if callable(initial) else initial
    if isinstance(value, trackable.CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype=dtype)


def _called_by_keras() -> bool:
    """Whether a variable of Keras 3 is being created, on the stack of calls."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_globals.get("__name__") == _KERAS:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
