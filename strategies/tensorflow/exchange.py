"""A worker's pulls and pushes of TensorFlow's variables that lie on parameter servers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from strategies.core.storage import Change, assign
from strategies.core.values import Array
from strategies.parameter_server import ParameterServerStrategy
from strategies.parameter_server.storage import ServedStorage
from strategies.tensorflow.operations import Operations
from strategies.tensorflow.served import Place, ServedVariable
from strategies.tensorflow.steps import Steps


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
        return _in_place_of(own, value) if own.dtype.is_floating else value

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
        try:
            for variable, value in zip(variables, values, strict=True):
                variable._primary.assign(value)
        except BaseException:
            if tf.executing_eagerly():
                self._steps.end(int(number))
            raise
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


@tf.custom_gradient
def _in_place_of(own: Any, value: Any) -> Any:
    """The value, with the derivative of the other tensor."""
    return tf.identity(value), lambda given: (given, None)
