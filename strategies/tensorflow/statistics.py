"""Running statistics that replicas change, as batch normalization does, are averaged.

The averages are part of the next reduction of the same step, that of the gradients, or are computed
at the end of `run`. Outside of `run` the variables are therefore equal on all ranks, and can be
read or saved by one rank alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from strategies.tensorflow.operations import Operations


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class Statistics(threading.local):
    """The variables that the current `run` of this thread has changed and not averaged yet."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._changed: list[dict[int, tuple[Any, Any]]] = []
        # Changed in a function that was traced within an eager run, and whose later calls execute
        # no Python: averaged at the end of every run.
        self._in_functions: dict[int, Any] = {}

    @property
    def running(self) -> bool:
        """Whether this thread is in a `run`."""
        return bool(self._changed)

    def changed(self, variable: Any) -> None:
        """Note that a replica assigned its own value."""
        self._changed[-1][id(variable)] = variable, _graph()

    @contextmanager
    def run(self) -> Iterator[None]:
        """The body of a `run`, at whose end the variables are averaged."""
        graph = _graph()
        self._changed.append({})
        try:
            yield
            for key, (variable, where) in self._changed[-1].items():
                if where is not graph:
                    self._in_functions[key] = variable
            kept = {key: variable for key, (variable, _) in self._changed[-1].items()}
        finally:
            self._changed.pop()
        left = list((kept | self._in_functions).values())
        if left:
            values = [each._primary.read_value() for each in left]
            self._assign(left, self._operations.reduce(values, mean=True))

    def due(self) -> list[Any]:
        """The variables that a reduction at this place of the program can average."""
        graph = _graph()
        changed = self._changed[-1] if self._changed else {}
        return [variable for variable, where in changed.values() if where is graph]

    def averaged(self, variables: list[Any], totals: list[Any]) -> None:
        """Assign averages from the sums over the ranks to variables that were due."""
        count = self._operations.communicator.size
        self._assign(variables, [each / tf.cast(count, each.dtype) for each in totals])
        for variable in variables:
            del self._changed[-1][id(variable)]

    def _assign(self, variables: list[Any], means: list[Any]) -> None:
        for variable, mean in zip(variables, means, strict=True):
            variable._primary.assign(mean)
