"""Steps in which this replica's batch has no rows, as at the end of unequal data.

Their derivatives are zero, but that of batch normalization, for example, is computed as 0 · NaN,
since the mean of no rows is NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from strategies.core.options import ReduceOp
from strategies.core.values import Array
from strategies.replication.replication import Replication
from strategies.tensorflow.graphs import current_graph, enclosing_function


class _Run(NamedTuple):
    graph: Any
    """In which `run` is called; None where that is no graph."""
    rows: list[Any]
    """The arrays that have a row for each example."""

    def is_empty(self) -> Any:
        """A bool where the shapes are known, or else a tensor, in the present graph."""
        lengths = [each.shape[0] for each in self.rows]
        if not lengths or any(lengths):
            return False
        if None not in lengths:
            return True
        return tf.reduce_max(tf.stack([tf.shape(each)[0] for each in self.rows])) == 0


class _Runs(threading.local):
    """This thread's runs, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Run] = []


class EmptyBatches:
    """Whether the present `run` has such a batch: the first argument that has rows has none.

    A function that is traced in one run is executed in others: it reads a variable.
    """

    def __init__(self) -> None:
        self._runs = _Runs()
        self._flag: Any = None
        """The variable, once a traced function reads it."""

    @contextmanager
    def run(self, arguments: Sequence[Any]) -> Iterator[None]:
        """The body of a `run` with these arguments; one within another is of the same batch.

        LossScaleOptimizer makes such runs, of gradients.
        """
        outer = self._runs.stack[-1] if self._runs.stack else None
        run = outer or _Run(current_graph(), _rows_of(arguments))
        self._runs.stack.append(run)
        try:
            if outer is None and self._flag is not None:
                self._flag.assign(run.is_empty())
            yield
        finally:
            self._runs.stack.pop()

    @property
    def graph_of_run(self) -> Any:
        """The graph in which this thread's `run` is called; None where there is none."""
        return self._runs.stack[-1].graph if self._runs.stack else None

    def is_empty(self) -> Any:
        """Whether the batch of this thread's run is empty: a bool or a tensor of the graph."""
        if not self._runs.stack:
            return False
        run, graph = self._runs.stack[-1], current_graph()
        if graph is None or enclosing_function(graph) is enclosing_function(run.graph):
            return run.is_empty()
        if self._flag is None:
            with tf.init_scope(), tf.device("/cpu:0"):
                # Of no strategy, whose scope surrounds this.
                self._flag = ResourceVariable(False, trainable=False, name="batch_is_empty")
            # The function that is being traced is called afterwards.
            with tf.init_scope() if run.graph is None else run.graph.as_default():
                self._flag.assign(run.is_empty())
        return self._flag.read_value()


def zeros_for_nan(arrays: Sequence[Array]) -> list[Array]:
    """Copies in which NaN is replaced by 0."""
    return [np.where(np.isnan(each), np.zeros_like(each), each) for each in arrays]


def sums_of_batches(replication: Replication, own: Sequence[Array], is_empty: bool) -> list[Array]:
    """The sums over the ranks, each scaled as if every rank counted.

    This rank's arrays that are NaN don't count if `is_empty`. Collective.
    """
    counted = [not (is_empty and np.isnan(each).any()) for each in own]
    values = [
        each if counts else np.zeros_like(each) for each, counts in zip(own, counted, strict=True)
    ]
    numbers = np.array(counted, np.float32)
    *totals, counts = replication.all_reduce_arrays([*values, numbers], ReduceOp.SUM)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = replication.communicator.size / counts
        return [
            np.asarray(total * share, total.dtype)
            for total, share in zip(totals, shares, strict=True)
        ]


def _rows_of(arguments: Sequence[Any]) -> list[Any]:
    """The arrays with axes of the first argument that has any."""
    for argument in arguments:
        arrays = [each for each in tf.nest.flatten(argument) if _has_axes(each)]
        if arrays:
            return arrays
    return []


def _has_axes(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return array.ndim > 0
    # The rank may be unknown.
    return isinstance(array, tf.Tensor) and bool(array.shape.rank)
