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
from collectives.cuda.interface import DeviceArray, is_torch
from collectives.cuda.runtime import cuda
from collectives.execution.engine import Engine
from collectives.reductions.reduction import ReduceOp

Bound = Callable[..., Any]

_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})


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

    def on_gpu(
        self,
        collective: str,
        array: Any,
        op: Any = None,
        *,
        out: Any = None,
        axis: Any = 0,
        root: Any = 0,
        **others: Any,
    ) -> Any:
        """A call of an array on a GPU, with the arguments of a communicator's; PASS if not bound.

        The first call of a kind isn't: in it all ranks choose a path. Nor is one with `others`.
        """
        engine = self._engine
        if any(each is not None for each in others.values()):
            return PASS
        along_rows, known_root = type(axis) is int and axis == 0, type(root) is int
        if not (along_rows and known_root and 0 <= root < engine.size):
            return PASS
        if collective in _REDUCTIONS:
            op = "sum" if op is None else op
            if not isinstance(op, str | ReduceOp):
                return PASS
        elif op is not None:
            return PASS
        if collective == "broadcast":
            out = array
        elif collective == "reduce" and root != engine.rank:
            out = None
        gpus, kind = cuda(), ("on a GPU", collective, op, root)
        if type(array) is gpus.array_type:
            return self._call_on_gpu(kind, array, out)
        if not is_torch(array) or (source := gpus.of_tensor(array)) is None:
            return PASS
        target = None
        if out is not None:
            target = source if out is array else gpus.of_tensor(out) if is_torch(out) else None
            if target is None:
                return PASS
        return engine.whole(self._tensors_on_gpu, kind, source, target, array, out)

    def _tensors_on_gpu(
        self, kind: Any, source: DeviceArray, target: DeviceArray | None, tensor: Any, out: Any
    ) -> Any:
        """A call on the memory of a tensor, and of `out` or None."""
        result = self._call_on_gpu(kind, source, target)
        if result is PASS:
            return PASS
        if result is not None and out is None:
            return cuda().export(result, tensor)
        # What it has read may be overwritten from now on, too.
        cuda().hand_back(tensor)
        return out

    def _call_on_gpu(self, kind: Any, array: DeviceArray, out: Any) -> Any:
        key = *kind, array.dtype, array.shape
        bound = self.known.get(key)
        if bound is not None:
            return bound(array, out)
        _, collective, op, root = kind
        devices = self._engine.devices
        bound = None if devices is None else devices.bind(collective, array, op, root)
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
