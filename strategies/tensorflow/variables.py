"""Variables of replicas that are processes: one local value each, kept equal by collectives.

The classes are TensorFlow's. What differs from them follows `strategies.variables`: a variable
without aggregation cannot be assigned in a replica, and ONLY_FIRST_REPLICA is the first rank's
value on every rank. Keras marks none of its variables, so these are treated by the code that
assigns them: what Keras itself assigns is equal on all ranks, as counters, seeds and constrained
weights, or is a running statistic. Statistics, of Keras and of a program's own layers, are
variables of floats that are not trained. They are averaged (`statistics`). The state of stateful
recurrent layers is each rank's own, as in TensorFlow.

A `tf.Variable` that was created outside of the scope is not of these classes. An optimizer's update
of it raises; a direct assignment inside of `run` is each rank's own, and is not detected.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, distribute_utils, values, values_util
from tensorflow.python.trackable import base as trackable

from strategies.core.same_error import PropagatedErrors

_KERAS = "keras.src.backend.tensorflow.core"
_KERAS_COMMON = "keras.src.backend.common.variables"
_OPTIMIZERS = "keras.src.optimizers"
_RECURRENT = "keras.src.layers.rnn"
_FRAMES = 25
_BETWEEN = ("tensorflow.", "strategies.tensorflow.", "keras.src.backend.", "keras.src.layers.layer")
"""Modules that assign what another caller has computed."""


class _Readable:
    """What `tf.Variable` has and TensorFlow's distributed variables lack: NumPy reads them."""

    numpy: Callable[[], Any]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.numpy(), dtype, copy=copy)

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())


class ReplicatedVariable(_Readable, values.MirroredVariable):
    """A variable that has the same value on every rank."""

    keras_variable: Any = None
    """A weak reference to the variable of Keras 3 that holds it; None for other variables."""

    number = 0
    """In the order of creation, equal on all ranks."""

    is_statistic = False
    """Whether replicas have assigned values of their own, which are averaged."""

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        extended = self._distribute_strategy.extended
        if extended.is_alone:
            return update_fn(self._primary, self._as_tensor(value), **kwargs)
        none = self._aggregation == tf.VariableAggregation.NONE
        first = self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        if self.keras_variable is not None and (none or first):
            caller = _assigning_module()
            # An optimizer's state is equal, a recurrent layer's belongs to the replica's own rows.
            of_state = caller.startswith((_OPTIMIZERS, _RECURRENT))
            if none and self.dtype.is_floating and not of_state and not self.is_trained():
                updated = update_fn(self._primary, self._as_tensor(value), **kwargs)
                self.is_statistic = True
                extended.statistic_changed(self)
                return updated
            if caller.startswith("keras."):
                # A counter would go on beside the error of a batch that isn't there.
                arguments = tf.distribute.get_replica_context().arguments
                with tf.control_dependencies(arguments):
                    return update_fn(self._primary, self._as_tensor(value), **kwargs)
        # Keras's assign_add is an assignment of the sum, which would be added up once more.
        keras_sum = self.keras_variable is not None and (
            self._aggregation == tf.VariableAggregation.SUM
        )
        if none or keras_sum:
            raise self._refusal()
        method = update_fn.__qualname__.partition(".")[0].removeprefix("on_write_")
        with PropagatedErrors(extended.operations.communicator, method):
            value = self._as_tensor(value)
        # Shapes alone don't show it: one variable's value would be added to another one's.
        with extended.operations.comparing(f"{method} of variable {self.number}"):
            return super()._update_replica(update_fn, value, **kwargs)

    def _as_tensor(self, value: Any) -> Any:
        if isinstance(value, values.DistributedValues) or tf.is_tensor(value):
            return value
        return tf.convert_to_tensor(value, dtype=self.dtype)

    def is_trained(self) -> bool:
        """Whether it is trainable; layers of Keras may be frozen after their variables are made."""
        holder = None if self.keras_variable is None else self.keras_variable()
        return bool(self.trainable if holder is None else holder.trainable)

    def _refusal(self) -> ValueError:
        remedy = "create it with aggregation=tf.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
        if self.keras_variable is not None:
            remedy = (
                "change a weight by an optimizer's apply, which sums the ranks' gradients; create a"
                " counter as keras.Variable(..., synchronization='on_read', aggregation='sum'), or"
                " with 'only_first_replica' where the replicas' values are equal; freeze a"
                " weight (trainable=False) whose values are to be averaged"
            )
        name = self.name if self.keras_variable is None else self._keras_name()
        return ValueError(
            f"variable {name!r} has aggregation {self._aggregation.name} and cannot be assigned"
            " inside of run, where replicas could assign different values:"
            f" {remedy}, or assign it outside of run"
        )

    def _keras_name(self) -> str:
        return str(getattr(self.keras_variable(), "path", self.name))


class LocalVariable(_Readable, values.SyncOnReadVariable):
    """A variable of which each rank has its own value, aggregated when read outside of run."""

    def value(self) -> Any:
        """The aggregate outside of run, and this rank's value inside and in a SavedModel."""
        first = self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        updated = values_util.in_replica_update_context()
        if first and not updated and not values_util.is_saving_non_distributed():
            with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
                if tf.distribute.in_cross_replica_context():
                    return self._get_cross_replica()
        return super().value()

    def _get_cross_replica(self) -> Any:
        if self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            extended = self._distribute_strategy.extended
            return extended.broadcast_to(self._primary.read_value(), self._primary.device)
        return super()._get_cross_replica()


CLASSES = {
    tf.VariableSynchronization.ON_WRITE: ReplicatedVariable,
    tf.VariableSynchronization.ON_READ: LocalVariable,
}
"""Those of replicas in step."""


def create(
    strategy: Any,
    device: str,
    mirror: Callable[[Callable[[], Any]], Any],
    next_creator: Callable[..., Any],
    classes: Mapping[Any, Any],
    **kwargs: Any,
) -> Any:
    """A variable with the chief's initial value, as TensorFlow's MirroredStrategy creates one.

    `mirror` gets a function that makes this rank's value; `classes` has a class for each
    synchronization.
    """

    def create_one(**arguments: Any) -> list[Any]:
        initial, dtype = arguments["initial_value"], arguments.get("dtype")
        arguments["initial_value"] = lambda: mirror(lambda: _evaluated(initial, dtype))
        with tf.device(device):
            return [next_creator(**arguments)]

    variable = distribute_utils.create_mirrored_variable(
        strategy,
        create_one,
        classes,
        distribute_utils.VARIABLE_POLICY_MAPPING,
        **kwargs,
    )
    variable.keras_variable = _keras_variable()
    return variable


def unnumbered(name: str) -> str:
    """A variable's name without numbers, since those of Keras count the layers of the process."""
    return re.sub(r"_\d+", "", name)


def described(arguments: Mapping[str, Any]) -> str:
    """A new variable's name, `unnumbered`, and rules, which must be equal on all ranks.

    Optimizers of Keras put the names of models and layers before those of their slots, which may
    have been given by rank.
    """
    name = unnumbered(arguments.get("name") or "Variable")
    if _keras_variable() is not None:
        name = name.rpartition("_")[2]
    rules = {rule: arguments.get(rule) for rule in ("synchronization", "aggregation")}
    # TensorFlow refuses what is no rule.
    names = {rule: getattr(value, "name", value) for rule, value in rules.items()}
    given = [
        f"{rule}={value}" for rule, value in names.items() if value not in (None, "AUTO", "NONE")
    ]
    given += [f"shape={arguments['shape']}"] * (arguments.get("shape") is not None)
    given += ["trainable=False"] * (arguments.get("trainable") is False)
    return f"variable {name!r}" + f" ({', '.join(given)})" * bool(given)


def _evaluated(initial: Any, dtype: Any) -> Any:
    value = initial() if callable(initial) else initial
    if isinstance(value, trackable.CheckpointInitialValue):
        value = value.wrapped_value
    return tf.convert_to_tensor(value, dtype=dtype)


def _keras_variable() -> weakref.ref[Any] | None:
    """A reference to the variable of Keras 3 that is being created, on the stack of calls."""
    for frame in islice(callers(), _FRAMES):
        if frame.f_globals.get("__name__") == _KERAS and "self" in frame.f_locals:
            return weakref.ref(frame.f_locals["self"])
    return None


def _assigning_module() -> str:
    """The name of the module whose code assigns a variable, on the stack of calls."""
    names = (str(frame.f_globals.get("__name__")) for frame in callers())
    return next((name for name in names if not name.startswith(_BETWEEN)), "")


def added_by_keras(variable: Any) -> Any:
    """What Keras's `assign_add` or `assign_sub`, which assign the sum, adds; None elsewhere.

    In the variable's shape and dtype.
    """
    holder = None if variable.keras_variable is None else variable.keras_variable()
    for frame in islice(callers(), _FRAMES):
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == _KERAS_COMMON and name in ("assign_add", "assign_sub"):
            if holder is None or frame.f_locals.get("self") is not holder:
                return None
            addend = tf.cast(frame.f_locals["value"], variable.dtype)
            addend = tf.broadcast_to(addend, variable.shape)
            # Unsigned integers have no negation.
            return addend if name == "assign_add" else tf.zeros_like(addend) - addend
    return None


def step_that_sums(pairs: Sequence[tuple[Any, Any]]) -> tuple[Any, list[Any]]:
    """The optimizer of Keras that sums gradients, on the stack of calls, and their variables.

    None, and the destinations of the pairs, without one.
    """
    for frame in callers():
        if frame.f_code.co_name == "_all_reduce_sum_gradients":
            given = frame.f_locals
            return given.get("self"), [each for _, each in given.get("filtered_grads_and_vars", ())]
    return None, [each for _, each in pairs]


def raw_value(variable: Any) -> Any:
    """This rank's value. The read does not become part of the gradient of a reduction around it."""
    own = variable._primary
    return tf.raw_ops.ReadVariableOp(resource=own.handle, dtype=own.dtype)


def updated_by_optimizer() -> bool:
    """Whether a step of an optimizer of Keras updates the variable, on the stack of calls."""
    return _is_called_by("_distributed_tf_update_step")


def summed_by_optimizer() -> bool:
    """Whether an optimizer, of Keras or of TensorFlow, sums gradients, on the stack of calls."""
    return _is_called_by(
        "_all_reduce_sum_gradients",
        "all_reduce_sum_gradients",
        "_distributed_apply",
        "agreed_check_finite",
        "sums_for_optimizer",
    )


def _is_called_by(*names: str) -> bool:
    return any(frame.f_code.co_name in names for frame in callers())


def callers() -> Iterator[FrameType]:
    """The frames of the stack, the caller's first."""
    return (frame for frame, _ in walk_stack(sys._getframe(1)))
