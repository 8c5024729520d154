"""One collective call on tensors: eagerly or in a graph, in the order of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from collectives import Communicator
from collectives.consistency.signature import shortened
from collectives.horovod.joining import ZEROS, Request, with_joined
from collectives.reductions.reduction import ReduceOp
from strategies.tensorflow.program_order import ProgramOrder
from strategies.tensorflow.result_memory import ResultMemory
from strategies.tensorflow.variables import unnumbered

_LIBRARY = "tensorflow"
_results = ResultMemory()


@cache
def _order() -> ProgramOrder:
    """Of all calls of the program, whatever their ranks are."""
    return ProgramOrder()


def call_alone(
    comm: Communicator,
    name: str,
    call: Callable[..., Sequence[Any]],
    tensors: Sequence[Any],
    shapes: Sequence[Any],
) -> list[Any]:
    """Make a call in which ranks that have joined can't take part.

    `call` is a function of arrays. Its results, as many as there are shapes, have the dtypes of the
    first tensors.
    """

    def run(*arrays: Any) -> Sequence[Any]:
        return with_joined(comm, Request(name), lambda: call(*arrays))

    return _order().execute(run, tensors, shapes)


def call_for_one(
    comm: Communicator, name: str, call: Callable[..., Any], tensors: Sequence[Any], shape: Any
) -> Any:
    """As `call_alone`, of one result."""
    return call_alone(comm, name, lambda *arrays: [call(*arrays)], tensors, [shape])[0]


def rows_of(tensor: Any) -> Any:
    """The shape of any number of such rows."""
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def reduce_in_one(
    comm: Communicator, tensors: Sequence[Any], op: ReduceOp, what: str | None = None
) -> list[Any]:
    """The ranks' tensors reduced, in few messages. Averages of integers are rounded towards zero.

    Ranks that have joined take part with zeros. `what` is a text that must be equal on all ranks.
    """

    def run(*arrays: Any) -> list[Any]:
        kinds = ((each.shape, str(each.dtype), "cpu") for each in arrays)
        request = Request("grouped_allreduce", tuple(kinds), op, library=_LIBRARY, what=what)
        wider = op is ReduceOp.MEAN and any(each.dtype.kind in "biu" for each in arrays)
        out = None if wider else _results.like(arrays)
        reduced = with_joined(
            comm, request, lambda: comm.all_reduce_many(arrays, op, out=out, what=what)
        )
        pairs = zip(reduced, arrays, strict=True)
        return [each.astype(array.dtype, copy=False) for each, array in pairs]

    return _order().execute(run, tensors, [each.shape for each in tensors])


def compare(comm: Communicator, what: str) -> None:
    """Return when every rank has called it; a MismatchError on every rank if their texts differ."""

    def run(number: Any) -> list[Any]:
        comm.barrier(what)
        return [number]

    call_alone(comm, what, run, [tf.constant(0)], [tf.TensorShape([])])


def compare_given(comm: Communicator, name: str, text: str | None) -> None:
    """As `compare`, of the arguments of a call; nothing where there is no text."""
    if text is not None:
        compare(comm, f"{name}: {text}")


def run_in_order(call: Callable[..., Sequence[Any]], tensors: Sequence[Any]) -> list[Any]:
    """Call a function of the tensors' arrays, of which it returns as many of their dtypes."""
    return _order().execute(call, tensors, [each.shape for each in tensors])


def _zeros(shape: tuple[int, ...], dtype: str, device: str) -> Any:
    return np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype)


ZEROS[_LIBRARY] = _zeros


def names_of(variables: Sequence[Any]) -> str:
    """The variables' names, as text to be compared.

    Of Keras's, with the names of their layers. Tensors have none.
    """
    names = [unnumbered(_name_of(each)) for each in variables]
    return f"{len(names)} variables: {shortened(names)}"


def _name_of(variable: Any) -> str:
    path = getattr(variable, "path", None)  # of Keras's
    if path is not None:
        return "/".join(path.split("/")[-2:])
    return str(variable.name).removesuffix(":0") if isinstance(variable, tf.Variable) else ""
