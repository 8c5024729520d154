"""Variables on parameter servers, with a copy in each worker that its steps compute on.

A step is a `run`. It begins with the servers' values of all variables, computes on the copies, and
ends by pushing what it has added to each of them, which the servers add to theirs in the order of
arrival. So any optimizer works, and counters count the steps of all workers.

Outside of steps a read pulls, and an assignment or addition is pushed. Neither touches the copies,
so any thread may do them during another thread's step. Steps share the copies, so they exclude each
other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values_util
from tensorflow.python.trackable import base as trackable

from strategies.core.storage import Change, assign, assign_add
from strategies.core.values import Array
from strategies.parameter_server import ParameterServerStrategy
from strategies.parameter_server.storage import ServedStorage
from strategies.tensorflow.operations import Operations, in_place_of
from strategies.tensorflow.steps import Steps
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
    exchange: Exchange

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
            addend = tf.broadcast_to(tf.cast(addend, self.dtype), self.shape)
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


class Exchange:
    """One worker's pulls and pushes of the variables of a strategy."""

    def __init__(self, arrays: ParameterServerStrategy, operations: Operations) -> None:
        self._arrays, self._operations = arrays, operations
        self._variables: list[weakref.ref[ServedVariable]] = []
        self._state = threading.local()
        self._steps = Steps()

    def add(self, variable: ServedVariable, place: Place) -> None:
        """Exchange this variable, too."""
        variable.place, variable.exchange = place, self
        self._variables.append(weakref.ref(variable))

    def serve(self, place: Place, value: Any, what: str) -> Any:
        """Put a new variable onto the servers, and return the chief's value of it.

        Raises TypeError for a dtype without arithmetic.
        """
        if value.dtype in (tf.string, tf.resource, tf.variant):
            raise TypeError(
                f"{what} has dtype {value.dtype.name}: variables on parameter servers are of"
                " numbers or bool; create others outside of the scope, or ON_READ"
            )

        def call(array: Array) -> list[Array]:
            stored = self._arrays.store(np.array(array), what)
            if not isinstance(stored, ServedStorage):
                return [array]
            place.storage, place.initial = stored, stored.read().copy()
            # TensorFlow may keep the memory that it gets.
            return [place.initial.copy()]

        return self._operations.execute(call, [value], [value.shape])[0]

    # Steps.

    @property
    def inside(self) -> bool:
        """Whether this thread executes or traces a step."""
        return getattr(self._state, "inside", False)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which variables are the copies."""
        before, self._state.inside = self.inside, True
        try:
            yield
        finally:
            self._state.inside = before

    @contextmanager
    def step(self, *, counts: bool = True) -> Iterator[None]:
        """The body of a step. One within another is a part of that. A failed step adds nothing.

        `counts`: whether it is a step for `staleness`.
        """
        if self.inside:
            yield
            return
        variables = self._present()
        number, *before = self._begin(variables)
        try:
            with self.computing():
                yield
            self._end(number, variables, before, counts)
        finally:
            if tf.executing_eagerly():
                self._steps.end(int(number))

    def read(self, variable: ServedVariable) -> Any:
        """Outside of steps, the servers' value, with the derivative of the copy."""
        own = variable._primary.value()

        def call(array: Array) -> list[Array]:
            return self._pulled([variable], [array])

        value = self._operations.execute(call, [own], [variable.shape])[0]
        return in_place_of(own, value) if own.dtype.is_floating else value

    def change(self, variable: ServedVariable, change: Change, value: Any) -> None:
        """Outside of steps, change the servers' value, if they have one."""

        def call(array: Array) -> list[Array]:
            if variable.place.storage is not None:
                variable.place.storage.change(change, array)
            return [array]

        self._operations.execute(call, [value], [variable.shape])

    def _present(self) -> list[ServedVariable]:
        return [each for reference in self._variables if (each := reference()) is not None]

    def _begin(self, variables: list[ServedVariable]) -> list[Any]:
        """Set the copies to the servers' values; the step's number, and the values, as tensors."""

        def call(_: Array, *own: Array) -> list[Array]:
            values = self._pulled(variables, own)
            number = self._steps.begin()
            for each in variables:
                each.place.initial = None
            return [np.array(number), *values]

        own = [tf.constant(0, tf.int64), *(each._primary.read_value() for each in variables)]
        shapes = [tf.TensorShape([]), *(each.shape for each in variables)]
        number, *values = self._operations.execute(call, own, shapes)
        for variable, value in zip(variables, values, strict=True):
            variable._primary.assign(value)
        return [number, *values]

    def _end(
        self, number: Any, variables: list[ServedVariable], before: list[Any], counts: bool
    ) -> None:
        """Push what the step has added to the copies, which had the values `before`."""
        present = {id(each) for each in variables}
        created = [each for each in self._present() if id(each) not in present]
        changed = [*variables, *created]

        def call(own_number: Array, *arrays: Array) -> list[Array]:
            self._steps.check(int(own_number))
            own, created_with = arrays[: len(changed)], [each.place.initial for each in created]
            old = [*arrays[len(changed) :], *created_with]
            for variable, array, value in zip(changed, own, old, strict=True):
                storage = variable.place.storage
                # None where another thread has created the variable meanwhile.
                if storage is None or value is None:
                    continue
                if not variable.is_assigned:
                    storage.push_difference(array, value)
                elif (array != value).any():
                    storage.change(assign, array)
            if counts and self._arrays.staleness is not None:
                self._arrays.worker.client.end_step()
            self._steps.end(int(own_number))
            return [own_number]

        own = [each._primary.read_value() for each in changed]
        self._operations.execute(call, [number, *own, *before], [tf.TensorShape([])])

    def _pulled(self, variables: list[ServedVariable], own: Sequence[Array]) -> list[Array]:
        """New arrays with the servers' values; `own` where they have none."""
        stored = [each.place.storage for each in variables]
        values = [
            array if storage is None else np.empty(storage.shape, storage.dtype)
            for storage, array in zip(stored, own, strict=True)
        ]
        wanted = [
            pull
            for storage, value in zip(stored, values, strict=True)
            if storage is not None
            for pull in storage.pulls_into(value)
        ]
        if wanted:
            self._arrays.worker.client.pull(wanted)
        return values


CLASSES = dict.fromkeys(
    (tf.VariableSynchronization.ON_WRITE, tf.VariableSynchronization.ON_READ), ServedVariable
)
