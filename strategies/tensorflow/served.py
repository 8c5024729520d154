"""Variables on parameter servers, with a copy in each worker that its steps compute on.

A step is a `run`. It begins with the servers' values of all variables, computes on the copies, and
ends by pushing what it has added to each of them, which the servers add to theirs in the order of
arrival. So any optimizer works, and counters count the steps of all workers. Outside of steps a
read pulls, and an assignment is pushed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import values_util
from tensorflow.python.trackable import base as trackable

from strategies.core.storage import assign, assign_add
from strategies.core.values import Array
from strategies.parameter_server import ParameterServerStrategy
from strategies.parameter_server.requests import ShardInfo
from strategies.parameter_server.storage import ServedStorage
from strategies.tensorflow.operations import Operations
from strategies.tensorflow.variables import ReplicatedVariable


class Place:
    """Where a variable is kept: on the servers, or in this process alone."""

    def __init__(self, storage: ServedStorage | None = None) -> None:
        self.storage = storage
        self._pulled: Array | None = None

    @property
    def pulled(self) -> Array:
        """The memory of the value that the present step began with."""
        if self._pulled is None:
            assert self.storage is not None
            self._pulled = np.empty(self.storage.shape, self.storage.dtype)
        return self._pulled


class ServedVariable(ReplicatedVariable):
    """A variable whose value is on the parameter servers; the copy is the primary."""

    place: Place
    exchange: Exchange

    chiefs_id: str | None = None
    """On a worker that serves a chief: by which the chief's optimizers identify the variable."""

    @property
    def _unique_id(self) -> str:
        return self.chiefs_id or str(super()._unique_id)

    @property
    def variables(self) -> list[Any]:
        """The parts, by rows, that a partitioner splits it into, as tensors."""
        bounds = getattr(self.place.storage, "bounds", [0, None])
        whole = self.read_value()
        return [whole[first:last] for first, last in pairwise(bounds)]

    def assign(self, value: Any, *options: Any, **named: Any) -> Any:
        """As of `tf.Variable`; outside of a step the value replaces the servers'."""
        if not self.exchange.inside:
            value = tf.convert_to_tensor(value, dtype=self.dtype)
            value.shape.assert_is_compatible_with(self.shape)
            value = self.exchange.write(self, value)
        with self.exchange.computing():
            return super().assign(value, *options, **named)

    def value(self) -> Any:
        """The present value."""
        self.exchange.refresh(self)
        return super().value()

    def _get(self) -> Any:
        self.exchange.refresh(self)
        return super()._get()

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {trackable.VARIABLE_VALUE_KEY: self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        """Restore the chief's value on the servers; the other workers wait for it."""
        value = restored_tensors[trackable.VARIABLE_VALUE_KEY]
        self.exchange.as_chief(lambda: self.assign(value))
        return tf.no_op()


class Exchange:
    """One worker's pulls and pushes of the variables of a strategy."""

    def __init__(self, arrays: ParameterServerStrategy, operations: Operations) -> None:
        self._arrays, self._operations = arrays, operations
        self._variables: list[weakref.ref[ServedVariable]] = []
        self._state = threading.local()

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
            place.storage = stored
            return [stored.read_into(place.pulled).copy()]

        return self._operations.execute(call, [value], [value.shape])[0]

    def as_chief(self, action: Any) -> None:
        """Call the function as the chief; the other workers wait until its changes are applied."""

        def act() -> None:
            action()

        self._arrays.chief_first(act)

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
        self._execute(self._pull, self._present(), assigns=True)
        with self.computing():
            yield
        self._execute(partial(self._push, counts), self._present())

    def refresh(self, variable: ServedVariable) -> None:
        """Outside of steps, copy the servers' value."""
        if not self.inside and not values_util.is_saving_non_distributed():
            self._execute(self._pull, [variable], assigns=True)

    def write(self, variable: ServedVariable, value: Any) -> Any:
        """Outside of steps, replace the servers' value. Returns the value."""

        def call(array: Array) -> list[Array]:
            if variable.place.storage is not None:
                variable.place.storage.change(assign, array)
            return [array]

        return self._operations.execute(call, [value], [variable.shape])[0]

    def _present(self) -> list[ServedVariable]:
        return [each for reference in self._variables if (each := reference()) is not None]

    def _execute(
        self, call: Any, variables: list[ServedVariable], *, assigns: bool = False
    ) -> None:
        """Call a function with variables and their copies' values; it may give other values."""
        if not variables:
            return
        own = [each._primary.read_value() for each in variables]
        shapes = [each.shape for each in variables]
        given = self._operations.execute(lambda *arrays: call(variables, arrays), own, shapes)
        if assigns:
            for variable, value in zip(variables, given, strict=True):
                variable._primary.assign(value)

    # What follows is called with arrays.

    def _pull(self, variables: list[ServedVariable], own: Sequence[Array]) -> list[Array]:
        places = [each.place for each in variables]
        wanted: list[tuple[ShardInfo, Array, Array | None]] = [
            (shard, part, None)
            for each in places
            if each.storage is not None
            for shard, part in zip(
                each.storage.info.shards, each.storage.parts_of(each.pulled), strict=True
            )
        ]
        if wanted:
            self._arrays.worker.client.pull(wanted)
        # TensorFlow may keep the memory that it gets, which the next pull overwrites.
        return [
            array if place.storage is None else place.pulled.copy()
            for place, array in zip(places, own, strict=True)
        ]

    def _push(
        self, counts: bool, variables: list[ServedVariable], own: Sequence[Array]
    ) -> Sequence[Array]:
        for variable, array in zip(variables, own, strict=True):
            storage = variable.place.storage
            if storage is None or (array == variable.place.pulled).all():
                continue
            if array.dtype == np.bool_:
                storage.change(assign, array)
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    storage.change(assign_add, np.subtract(array, variable.place.pulled))
        if counts and self._arrays.staleness is not None:
            self._arrays.worker.client.end_step()
        return own


CLASSES = dict.fromkeys(
    (tf.VariableSynchronization.ON_WRITE, tf.VariableSynchronization.ON_READ), ServedVariable
)
