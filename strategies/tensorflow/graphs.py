"""Graphs of functions, and of the branches and loops within them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs

_BRANCHES = (
    control_flow_v2_func_graphs.CondBranchFuncGraph,
    control_flow_v2_func_graphs.WhileBodyFuncGraph,
    control_flow_v2_func_graphs.WhileCondFuncGraph,
)


def current_graph() -> Any:
    """The graph that is being built; None where operations are executed at once."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def enclosing_function(graph: Any, of_run: Any = None) -> Any:
    """The graph of the function in which a graph is a branch, or the body of a loop.

    `of_run`: that of a `run`, if it is reached before.
    """
    while isinstance(graph, _BRANCHES) and graph is not of_run:
        graph = graph.outer_graph
    return graph
