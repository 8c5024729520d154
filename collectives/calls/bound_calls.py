"""What the bound calls of one communicator have in common: they are found by op, dtype and shape.

Plain torch tensors are taken as their memory. Other arrays that a bound call can't take as they are
(of another library, strides or dtype than that of the fold) are brought into shape here, before the
same bound call: all ranks take the same path, whatever they give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.arrays.tensor_memory import TensorMemory
from collectives.arrays.tensors import to_torch
from collectives.caching import LRU
from collectives.calls import PASS
from collectives.cuda.runtime import cuda
from collectives.execution.engine import Engine
from collectives.reductions.reduction import ReduceOp

Bound = Callable[..., Any]


class BoundCalls:
    """Bound calls. A method returns PASS, before it did anything, for what it doesn't bind."""

    def __init__(self, engine: Engine, check_open: Callable[[], None]) -> None:
        """`check_open` raises where no call can be made."""
        self._engine, self._check_open = engine, check_open
        self.known: LRU[Any, Bound] = LRU()
        """By (op, dtype, shape) or (op, dtype, shape, what) those of `all_reduce`.

        The keys of the others have other lengths: an unknown op must not find another call.
        """
        self._tensors = TensorMemory()

    def _call(self, key: Any, bind: Callable[[], Bound], source: Any, target: Any) -> Any:
        """Make the call of that key, which is bound where it isn't yet."""
        for _ in range(2):
            bound = self.known.get(key)
            if bound is None:
                self._check_open()
                bound = self.known.put(key, bind())
            result = bound(source, target)
            # Bound before another thread made the first registered array: once more.
            if result is not PASS:
                return result
            self.known.pop(key, None)
        raise AssertionError(f"{key}: no call was made")

    def _on_gpu(
        self, collective: str, array: Any, out: Any, op: Any = None, axis: Any = 0, root: int = 0
    ) -> Any:
        """A call of an array on a GPU; PASS where it isn't bound.

        The first call of a kind isn't: in it all ranks choose a path.
        """
        devices, known_op = self._engine.devices, op is None or isinstance(op, str | ReduceOp)
        along_rows = type(axis) is int and axis == 0
        if not (type(array) is cuda().array_type and known_op and along_rows) or devices is None:
            return PASS
        key = ("on a GPU", collective, op, array.dtype, array.shape, root)
        bound = self.known.get(key)
        if bound is not None:
            return bound(array, out)
        bound = devices.bind(collective, array, op, root)
        if bound is not None:
            self.known.put(key, bound)
        return PASS


def as_tensor(call: Callable[..., Any], *arguments: Any) -> Any:
    """The array that a call returns as a tensor; None where it returns None.

    For `CallScope.whole`: a signal's exception in the conversion must not look like that of a call
    that was not made.
    """
    result = call(*arguments)
    return None if result is None else to_torch(result)
