"""Memory for results that become tensors, for every step the same.

Fresh memory costs as much as a reduction of half a megabyte: the kernel clears each page. And
TensorFlow copies an array that does not begin where its own tensors do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.caching import LRU
from collectives.messaging.buffers import ReusedArray
from strategies.core.values import Array

ALIGNMENT = 64
"""Of a tensor's memory, in bytes."""
_LISTS_KEPT = 16

Kinds = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


class ResultMemory:
    """Arrays for results; memory is given out again once TensorFlow has freed the tensors in it."""

    def __init__(self) -> None:
        self._known: LRU[Kinds, _Block] = LRU(_LISTS_KEPT)

    def like(self, arrays: Sequence[Array]) -> list[Array]:
        """Arrays of the same shapes and dtypes, without content."""
        kinds = tuple((each.shape, each.dtype) for each in arrays)
        return (self._known.recall(kinds) or self._known.put(kinds, _Block(kinds))).take()


class _Block:
    """The memory of the arrays of one list."""

    def __init__(self, kinds: Kinds) -> None:
        self._places, end = [], 0
        for shape, dtype in kinds:
            self._places.append((shape, dtype, end))
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._memory = ReusedArray((end + ALIGNMENT,), np.dtype(np.uint8))

    def take(self) -> list[Array]:
        # A reference to each of the arrays is one to the whole memory.
        memory: Any = self._memory.take()
        start = -memory.ctypes.data % ALIGNMENT
        return [np.ndarray(shape, dtype, memory, start + at) for shape, dtype, at in self._places]
