"""What the bound calls of one communicator have in common: they are found by what was asked for.

Plain torch tensors are taken as their memory. Other arrays that a bound call can't take as they are
(of another library, strides or dtype than that of the fold) are brought into shape here, before the
same bound call: all ranks take the same path, whatever they give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.arrays.tensor_memory import TensorMemory
from collectives.caching import LRU
from collectives.calls import PASS
from collectives.execution.engine import Engine

Bound = Callable[..., Any]


class BoundCalls:
    """Bound calls. Each method returns PASS for arrays on GPUs, before it did anything."""

    def __init__(self, engine: Engine, check_open: Callable[[], None]) -> None:
        """`check_open` raises where no call can be made."""
        self._engine, self._check_open = engine, check_open
        self.known: LRU[Any, Bound] = LRU()
        """By (op, dtype, shape) those of `all_reduce`, by longer keys the others."""
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
