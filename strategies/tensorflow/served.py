"""Variables on parameter servers, with a copy in each worker that its steps compute on.

A step is a `run`. It begins with the servers' values of all variables, computes on the copies, and
ends by pushing what it has added to each of them, which the servers add to theirs in the order of
arrival. So any optimizer works, and counters count the steps of all workers.

Outside of steps a read pulls, and an assignment or addition is pushed. Neither touches the copies,
so any thread may do them during another thread's step. Steps share the copies, so they exclude each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values_util
from tensorflow.python.trackable import base as trackable

from strategies.core.storage import Change, assign, assign_add
from strategies.core.values import Array
from strategies.parameter_server.storage import ServedStorage
from strategies.tensorflow.variables import ReplicatedVariable, added_by_keras


class Place:
    """Where a variable is kept: on the servers, or in this process alone."""

    def __init__(self, storage: ServedStorage | None = None) -> None:
        self.storage = storage
        self.initial: Array | None = None
        """The first value, until a step pulls: that of a step which creates the variable."""


class ServedVariable(ReplicatedVariable):
    """A variable whose value is on the parameter servers; the copy is the primary."""

    place: Place
    exchange: Any
    """The `Exchange` of its strategy."""

    chiefs_id: str | None = None
    """On a worker that serves a chief: the id by which its optimizers know the variable."""

    is_assigned = False
    """Whether the last step's value counts, and not the sum of what steps have added."""

    @property
    def _unique_id(self) -> str:
        return self.chiefs_id or str(super()._unique_id)

    @property
    def variables(self) -> list[Any]:
        """The parts, by rows, that a partitioner splits it into, as tensors."""
        bounds = getattr(self.place.storage, "bounds", [0, None])
        whole = self.read_value()
        return [whole[first:last] for first, last in pairwise(bounds)]

    def assign(
        self, value: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """As of `tf.Variable`; outside of a step the value replaces the servers'.

        What Keras's `assign_add` or `assign_sub` assigns is added to the servers'.
        """
        if not self._is_outside():
            return super().assign(value, use_locking, name, read_value)
        addend = added_by_keras(self)
        if addend is not None:
            self._change(assign_add, addend, lambda: super(ServedVariable, self).assign(value))
        else:
            self._change(assign, value, lambda: super(ServedVariable, self).assign(value))
        return self if read_value else None

    def assign_add(
        self, value: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """As of `tf.Variable`; outside of a step the value is added to the servers'."""
        if not self._is_outside():
            return super().assign_add(value, use_locking, name, read_value)
        self._change(assign_add, value, lambda: super(ServedVariable, self).assign_add(value))
        return self if read_value else None

    def assign_sub(
        self, value: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """As of `tf.Variable`; outside of a step the value is subtracted from the servers'."""
        if not self._is_outside():
            return super().assign_sub(value, use_locking, name, read_value)
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        return self.assign_add(tf.zeros_like(value) - value, use_locking, name, read_value)

    def _change(self, change: Change, value: Any, act: Callable[[], Any]) -> None:
        """Change the servers' value; if they have none, call the function to change the copy."""
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        value.shape.assert_is_compatible_with(self.shape)
        self.exchange.change(self, change, value)
        if self.place.storage is None:
            with self.exchange.computing():
                act()

    def value(self) -> Any:
        """The present value."""
        return self.exchange.read(self) if self._is_outside() else super().value()

    def _get(self) -> Any:
        return self.exchange.read(self) if self._is_outside() else super()._get()

    def _is_outside(self) -> bool:
        return not (self.exchange.inside or values_util.is_saving_non_distributed())

    def __deepcopy__(self, memo: dict[int, Any]) -> ServedVariable:
        """A variable of this worker's own, with the present value."""
        copied: ServedVariable = super().__deepcopy__(memo)
        self.exchange.add(copied, Place())
        copied.assign(self.read_value())
        return copied

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {trackable.VARIABLE_VALUE_KEY: self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        """Restore the chief's value on the servers, for which others wait, or this worker's own."""
        value, storage = restored_tensors[trackable.VARIABLE_VALUE_KEY], self.place.storage
        restore = partial(self.assign, value, read_value=False)
        if storage is None:
            restore()
        else:
            what = f"restore of {storage.info.what}, shard {storage.info.shards[0].number}"
            self._distribute_strategy.chief_first(restore, what)
        return tf.no_op()


CLASSES = dict.fromkeys(
    (tf.VariableSynchronization.ON_WRITE, tf.VariableSynchronization.ON_READ), ServedVariable
)
