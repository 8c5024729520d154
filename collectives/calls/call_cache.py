"""The short ways of one communicator's calls, kept by what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.arrays.kinds import Output
from collectives.calls.bound import (
    PASS,
    AllReduce,
    bind_all_gather,
    bind_all_reduce,
    bind_broadcast,
    bind_reduce_scatter,
)
from collectives.calls.reductions import ReduceInput
from collectives.cuda.runtime import cuda, on_gpu
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, as_op

_KEPT = 512


class CallCache:
    """What `quick` makes, made once for each kind of call."""

    def __init__(self, engine: Engine, check_open: Callable[[], None]) -> None:
        """`check_open` raises where no call can be made."""
        self._engine, self._check_open = engine, check_open
        self.known: dict[Any, Callable[..., Any]] = {}
        """By (op, dtype, shape) those of `all_reduce`, by longer keys the others."""

    def all_reduce(self, array: Any, op: ReduceOp | str, out: Any, what: str | None) -> Any:
        """Of arguments of any kind; PASS, before anything was done, where there is no short way."""
        if on_gpu(array):
            return PASS if what is not None else self._all_reduce_on_gpu(array, op, out)
        given = ReduceInput(array, op)
        output = given.output(out)
        self._check_open()
        quick = bind_all_reduce(self._engine, given, what)
        if quick is None:
            return PASS
        key = op, given.array.dtype, given.shape
        self._remember(key if what is None else (*key, what), quick)
        return self._engine.whole(_make, quick, given, output)

    def _all_reduce_on_gpu(self, array: Any, op: ReduceOp | str, out: Any) -> Any:
        """As `all_reduce`; what is new goes the general way first, where all ranks choose it."""
        known_kind = type(array) is cuda().array_type and isinstance(op, str | ReduceOp)
        if not known_kind or self._engine.devices is None:
            return PASS
        key = ("on a GPU", op, array.dtype, array.shape)
        quick = self.known.get(key)
        if quick is not None:
            return quick(array, out)
        quick = self._engine.devices.bind_all_reduce(ReduceInput(array, op))
        if quick is not None:
            self._remember(key, quick)
        return PASS

    def broadcast(self, array: Array, root: int) -> Any:
        """Of contiguous arrays that can be written."""
        key = ("broadcast", array.dtype, array.shape, root)
        quick = self.known.get(key)
        if quick is None:
            self._check_open()
            quick = self._remember(key, bind_broadcast(self._engine, array, root))
        return quick(array)

    def all_gather(self, array: Array, out: Array) -> Any:
        """Along axis 0 into `out`; PASS where the arrays need care."""
        key = ("all_gather", array.dtype, array.shape, out.dtype, out.shape)
        quick = self.known.get(key)
        if quick is None:
            self._check_open()
            quick = self._remember(key, bind_all_gather(self._engine, array, out))
        return quick(array, out)

    def reduce_scatter(self, array: Array, op: ReduceOp | str, out: Array) -> Any:
        """Along axis 0 into `out`; PASS where the arrays need care."""
        key = ("reduce_scatter", op, array.dtype, array.shape, out.dtype, out.shape)
        quick = self.known.get(key)
        if quick is None:
            self._check_open()
            made = bind_reduce_scatter(self._engine, array, as_op(op), out)
            quick = self._remember(key, made)
        return quick(array, out)

    def _remember(self, key: Any, quick: Callable[..., Any]) -> Callable[..., Any]:
        if len(self.known) >= _KEPT:
            self.known.clear()
        self.known[key] = quick
        return quick


def _make(quick: AllReduce, given: ReduceInput, output: Output) -> Any:
    """The call by its short way, and what is to be done with the result."""
    source, target = given.source_for(output), output.buffer.reshape(given.shape)
    given_array = target if source is None else source.reshape(given.shape)
    return PASS if quick(given_array, target) is PASS else output.deliver()
