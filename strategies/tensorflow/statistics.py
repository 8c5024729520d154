"""Running statistics that replicas change, as batch normalization does, are averaged.

The averages are part of the next reduction of the same step, that of the gradients, or are computed
at the end of `run`. Outside of `run` the variables are therefore equal on all ranks, and can be
read or saved by one rank alone.

The mean and the variance of a batch without rows are NaN, and so are the statistics that a rank
computes from them. Those of a rank without rows are left out of the averages.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from strategies.tensorflow.empty_batches import EmptyBatches
from strategies.tensorflow.graphs import current_graph, enclosing_function
from strategies.tensorflow.operations import Operations


class _Function:
    """The variables that a traced function changes, and whether it was executed since."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/cpu:0"):
            # Of no strategy, whose scope surrounds this.
            self.executed = ResourceVariable(False, trainable=False, name="statistics_changed")
        self._variables: dict[int, weakref.ref[Any]] = {}

    def add(self, variable: Any) -> None:
        """Note that the function changes the variable."""
        self._variables[id(variable)] = weakref.ref(variable)

    def remove(self, variable: Any) -> None:
        """Note that the function averages the variable itself."""
        self._variables.pop(id(variable), None)

    @property
    def variables(self) -> list[Any]:
        """Those that exist. While a function can be executed, all of them do, on all ranks."""
        found = [reference() for reference in self._variables.values()]
        return [each for each in found if each is not None]


class _Changed(threading.local):
    """The variables that the current runs of this thread have changed and not averaged yet."""

    def __init__(self) -> None:
        self.runs: list[dict[int, tuple[Any, Any]]] = []


class Statistics:
    """The running statistics of a strategy's variables."""

    def __init__(self, operations: Operations, batches: EmptyBatches) -> None:
        self._operations, self._batches = operations, batches
        self._changed = _Changed()
        # Later calls of traced functions execute no Python, and may be those of other threads.
        self._functions: weakref.WeakKeyDictionary[Any, _Function] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        """Whether this thread is in a `run`."""
        return bool(self._changed.runs)

    def changed(self, variable: Any) -> None:
        """Note that a replica assigned its own value."""
        graph = current_graph()
        self._changed.runs[-1][id(variable)] = variable, graph
        if graph is not None:
            function = self._function(graph)
            function.add(variable)
            function.executed.assign(True)

    @contextmanager
    def run(self) -> Iterator[None]:
        """The body of a `run`, at whose end the variables are averaged."""
        graph = current_graph()
        self._changed.runs.append({})
        try:
            yield
            changed = self._changed.runs[-1]
        finally:
            self._changed.runs.pop()
        here = [variable for variable, where in changed.values() if where is graph]
        if graph is not None:
            for variable in here:
                self._function(graph).remove(variable)
        self._average(here)
        with self._lock:
            functions = list(self._functions.items())
        for each, function in functions:
            if each is not enclosing_function(graph) and function.variables:
                self._average_after(function)

    def _function(self, graph: Any) -> _Function:
        graph = enclosing_function(graph)
        with self._lock:
            if graph not in self._functions:
                self._functions[graph] = _Function()
            return self._functions[graph]

    def _average_after(self, function: _Function) -> None:
        """Average what the function has changed, if it was executed in this run."""

        def average() -> None:
            function.executed.assign(False)
            self._average(function.variables)

        execute_if(function.executed, average)

    def _average(self, variables: list[Any]) -> None:
        if variables:
            values = [each._primary.read_value() for each in variables]
            empty = self._batches.is_empty()
            means = self._operations.reduce([], mean=True, statistics=values, empty=empty)
            self._assign(variables, means)

    def due(self) -> list[Any]:
        """The variables that a reduction at this place of the program can average."""
        graph = current_graph()
        changed = self._changed.runs[-1] if self._changed.runs else {}
        return [variable for variable, where in changed.values() if where is graph]

    def averaged(self, variables: list[Any], totals: list[Any]) -> None:
        """Assign averages from the sums over the ranks to variables that were due."""
        count = self._operations.communicator.size
        self._assign(variables, [each / tf.cast(count, each.dtype) for each in totals])
        graph = current_graph()
        for variable in variables:
            del self._changed.runs[-1][id(variable)]
            if graph is not None:
                self._function(graph).remove(variable)

    def _assign(self, variables: list[Any], means: list[Any]) -> None:
        for variable, mean in zip(variables, means, strict=True):
            variable._primary.assign(mean, read_value=False)


def execute_if(condition: Any, action: Callable[[], None]) -> None:
    """Execute the action if a tensor or variable is true, eagerly or in a graph."""
    if tf.executing_eagerly():
        if condition:
            action()
        return

    def act() -> Any:
        action()
        return tf.constant(0)

    tf.cond(condition, act, lambda: tf.constant(0))
