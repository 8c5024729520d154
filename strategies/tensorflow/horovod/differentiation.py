"""Differentiable calls. The comparison of a gradient's call includes the call it belongs to.

A tape with several targets differentiates them in an order that depends on the numbers of all its
operations, of which ranks may record different ones. Calls of equal shapes would be exchanged. The
calls are told apart by numbers within one `tf.function`, or eagerly since the last gradient; those
of different functions are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from collectives import Communicator
from collectives.horovod.joining import between_steps
from collectives.reductions.reduction import ReduceOp
from strategies.tensorflow.graphs import current_graph
from strategies.tensorflow.horovod.calls import compare, reduce_in_one

LINEAR = (ReduceOp.SUM, ReduceOp.MEAN)


class _Count:
    """Of the calls since the last gradient on one communicator, in one graph or eagerly.

    In one graph, since ranks may trace different functions before it.
    """

    def __init__(self) -> None:
        self._last, self._is_over = 0, False
        between_steps.add(self)

    def next(self) -> int:
        """The number of a new call."""
        self._last = 1 if self._is_over else self._last + 1
        self._is_over = False
        return self._last

    def end(self) -> None:
        """The next call is the first again."""
        self._is_over = True

    def all_joined(self) -> None:
        """Ranks that have joined made fewer calls."""
        self.end()


_counts: WeakKeyDictionary[Any, WeakKeyDictionary[Communicator, _Count]] = WeakKeyDictionary()
"""By the graph that the calls are in; by the module `tf` those in none."""


def _count_of(comm: Communicator) -> _Count:
    of_place = _counts.setdefault(current_graph() or tf, WeakKeyDictionary())
    if comm not in of_place:
        of_place[comm] = _Count()
    return of_place[comm]


def name_of(comm: Communicator, call: str | None = None) -> str:
    """The name of a call that has returned, by which its gradient is compared.

    A number, unless it has a name already: calls of gradients, for example, are not numbered.
    """
    return f"call {_count_of(comm).next()}" if call is None else call


def gradient_of(comm: Communicator, name: str) -> str:
    """The name of the gradient of the call."""
    _count_of(comm).end()
    return f"gradient of {name}"


def compare_gradient(comm: Communicator, name: str) -> str:
    """The name of the gradient of the call; a MismatchError where ranks have another call's."""
    text = gradient_of(comm, name)
    compare(comm, text)
    return text


def reduced(
    comm: Communicator,
    tensors: Sequence[Any],
    op: ReduceOp,
    what: str | None = None,
    call: str | None = None,
) -> list[Any]:
    """As `reduce_in_one`, of one tensor or more; the gradient is reduced by the same op.

    `call` is as of `name_of`.
    """

    @tf.custom_gradient
    def reduce(*given: Any) -> Any:
        results = reduce_in_one(comm, given, op, what)
        name = name_of(comm, call)

        def gradient(*gradients: Any) -> Any:
            if op not in LINEAR:
                raise NotImplementedError(f"allreduce by {op.value}: has no gradient")
            return reduced_gradients(comm, gradients, op, name)

        return results, gradient

    return list(reduce(*tensors))


def reduced_gradients(
    comm: Communicator, gradients: Sequence[Any], op: ReduceOp, call: str
) -> list[Any]:
    """The gradients of that call, reduced; a MismatchError where ranks have those of others."""
    text = gradient_of(comm, call)
    return reduced(comm, list(map(tf.convert_to_tensor, gradients)), op, text, text)
