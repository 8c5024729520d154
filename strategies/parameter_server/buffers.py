"""Memory used again: fresh memory of megabytes costs more than copying into it."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Kind = tuple[tuple[int, ...], np.dtype[Any]]


class ReusedArray:
    """An array that is given out again when nobody refers to it, nor to a view of it, any more."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._shape, self._dtype = shape, dtype
        self._array: Array = np.empty(shape, dtype)
        self._lock = threading.Lock()

    def take(self) -> Array:
        """The array, or a new one where the last one is in use. Its content is of no meaning."""
        # Two threads that count at once would both find it unused.
        with self._lock:
            if self._references() != _UNUSED:
                self._array = np.empty(self._shape, self._dtype)
            return self._array

    def _references(self) -> int:
        return sys.getrefcount(self._array) if _COUNTED else 0


_COUNTED = sys.implementation.name == "cpython"
# Elsewhere nobody knows who refers to what: a number that no array has.
_UNUSED = ReusedArray((), np.dtype(np.uint8))._references() if _COUNTED else -1


class Copies:
    """Copies of arrays, whose memory is used again once they are given back.

    All together they take no more memory than were in use at once, whatever shapes come.
    """

    def __init__(self) -> None:
        self._free: OrderedDict[Kind, list[Array]] = OrderedDict()
        self._used_bytes = self._free_bytes = self._most_bytes = 0

    def copy(self, array: Array) -> Array:
        """A copy in C order."""
        kind = array.shape, array.dtype
        copied = self._take(kind) if kind in self._free else np.empty(*kind)
        self._used_bytes += copied.nbytes
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        self._forget_surplus()
        copied[...] = array
        return copied

    def give_back(self, copied: Array) -> None:
        """Nobody needs it any more."""
        kind = copied.shape, copied.dtype
        self._used_bytes -= copied.nbytes
        self._free_bytes += copied.nbytes
        self._free.setdefault(kind, []).append(copied)
        self._free.move_to_end(kind)

    def _take(self, kind: Kind) -> Array:
        taken = self._free[kind].pop()
        if not self._free[kind]:
            del self._free[kind]
        self._free_bytes -= taken.nbytes
        return taken

    def _forget_surplus(self) -> None:
        while self._used_bytes + self._free_bytes > self._most_bytes:
            oldest = next(iter(self._free))
            self._take(oldest)
