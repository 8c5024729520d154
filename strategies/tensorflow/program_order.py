"""Calls of Python functions on tensors in the order of the program, also in a `tf.function`.

Eagerly a function is called at once with the tensors' memory. In a graph it is one
`tf.numpy_function`, whose arrays are the tensors' memory, too. Every operation reads and assigns
one variable, the token. TensorFlow executes the users of a resource in the order of the program, in
branches, loops and called functions as well, so all ranks execute their collectives in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model import save_context

from strategies.tensorflow import failures, traces
from strategies.tensorflow.failures import OPERATION, carried


class ProgramOrder:
    """Calls that run one after the other."""

    def __init__(self) -> None:
        failures.install()
        traces.install()
        with tf.init_scope(), tf.device("/cpu:0"):
            self._token = tf.Variable(0, trainable=False, dtype=tf.int64, name="collectives_token")

    def execute(
        self, call: Callable[..., Sequence[Any]], inputs: Sequence[Any], shapes: Sequence[Any]
    ) -> list[Any]:
        """Call a function of arrays with tensors.

        Its results, as many as there are shapes, have the dtypes of the first inputs.
        """
        if tf.executing_eagerly():
            # Of tensors without axes NumPy makes scalars.
            try:
                results = call(*[np.asarray(each.numpy()) for each in inputs])
            except Exception as error:
                # AutoGraph would raise another one, where a function that calls this is traced.
                error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph reads it
                raise
            return [tf.convert_to_tensor(each) for each in results]

        def operation(*arrays: Any) -> list[Any]:
            try:
                return [np.asarray(each) for each in call(*map(np.asarray, arrays))]
            except Exception as error:
                raise carried(error) from None

        _refuse_saving()
        before = self._token.read_value()
        with tf.control_dependencies([before]):
            dtypes = [each.dtype for each in inputs[: len(shapes)]]
            outputs = tf.numpy_function(operation, inputs, dtypes, name=OPERATION)
        with tf.control_dependencies(outputs):
            self._token.assign(before)
        for output, shape in zip(outputs, shapes, strict=True):
            output.set_shape(shape)
        return list(outputs)


def _refuse_saving() -> None:
    """ValueError where the function being traced is part of a SavedModel, now or later."""
    problem = (
        "a function with a collective of strategies.tensorflow (reduce, gather, all_reduce, an"
        " optimizer's apply, a variable that is aggregated when read) can't be part of a"
        " SavedModel, which one process uses: keep it out of the object that is saved"
    )
    if save_context.in_save_context():
        raise ValueError(problem)
    if tf.inside_function():
        tf.compat.v1.get_default_graph().mark_as_unsaveable(problem)
