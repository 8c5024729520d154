"""What the bound calls of one communicator have in common: they are found by op, dtype and shape.

Plain torch tensors are taken as their memory. Other arrays that a bound call can't take as they are
(of another library, strides or dtype than that of the fold) are brought into shape here, before the
same bound call: all ranks take the same path, whatever they give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
_ROOTED = frozenset({"broadcast", "reduce"})
_OPS = str, ReduceOp


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
        """A call of an array on a GPU; PASS where it isn't bound."""
        if not (type(axis) is int and axis == 0 and (op is None or isinstance(op, _OPS))):
            return PASS
        if type(array) is cuda().array_type:
            kind = "on a GPU", collective, op, array.dtype, array.shape, root
            if (bound := self.known.get(kind)) is not None:
                return bound(array, out)
            self._bind_on_gpu(kind, array)
            return PASS
        found = self.find_on_gpu(collective, array, out=out, op=op, root=root)
        return PASS if found is None else self._engine.whole(found.run)

    def find_on_gpu(
        self,
        collective: str,
        array: Any,
        *,
        out: Any = None,
        op: Any = None,
        axis: Any = 0,
        root: Any = 0,
    ) -> CallOnGpu | None:
        """The bound call of an array or a tensor on a GPU; None where there is none.

        The first call of a kind has none: in it all ranks choose a path. Nothing is sent.
        """
        rooted, reduces = collective in _ROOTED, collective in _REDUCTIONS
        if not (type(axis) is int and axis == 0 and type(root) is int):
            return None
        if not (0 <= root < self._engine.size and (isinstance(op, _OPS) if reduces else not op)):
            return None
        if collective == "broadcast":
            out = array
        elif rooted and root != self._engine.rank:
            out = None
        source, target, tensor = array, out, None
        gpus = cuda()
        if type(array) is not gpus.array_type:
            if not is_torch(array) or (source := gpus.of_tensor(array)) is None:
                return None
            tensor = array
            if out is array:
                target = source
            elif out is not None and (not is_torch(out) or (target := gpus.of_tensor(out)) is None):
                return None
        kind = "on a GPU", collective, op, source.dtype, source.shape, root
        if (bound := self.known.get(kind)) is not None:
            return CallOnGpu(bound, source, target, tensor, out)
        self._bind_on_gpu(kind, source)
        return None

    def _bind_on_gpu(self, kind: Any, array: DeviceArray) -> None:
        """Bind the calls of a kind from the next one on."""
        devices = self._engine.devices
        if devices is None:
            return
        self._check_open()
        _, collective, op, _, _, root = kind
        bound = devices.bind(collective, array, op, root)
        if bound is not None:
            self.known.put(kind, bound)


class CallOnGpu(NamedTuple):
    """A bound call on the memory of arrays or tensors on a GPU."""

    bound: Bound
    source: DeviceArray
    target: DeviceArray | None
    tensor: Any
    """The tensor whose memory the source is, or None."""
    out: Any

    def run(self) -> Any:
        """Make the call; its result, or PASS where the arrays are not what was bound."""
        result = self.bound(self.source, self.target)
        if self.tensor is None or result is PASS:
            return result
        if result is not None and self.out is None:
            return cuda().export(result, self.tensor)
        # What was read may be overwritten from now on, too.
        cuda().hand_back(self.tensor)
        return self.out


def as_tensor(call: Callable[..., Any], *arguments: Any) -> Any:
    """The array that a call returns as a tensor; None where it returns None.

    For `CallScope.whole`: a signal's exception in the conversion must not look like that of a call
    that was not made.
    """
    result = call(*arguments)
    return None if result is None else to_torch(result)
