"""Memory that is used again: fresh memory of megabytes costs more than copying into it."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.messaging.message import SendRequest

Array = NDArray[Any]
Kind = tuple[tuple[int, ...], np.dtype[Any]]


class ReusedArray:
    """An array that is given out again once neither it nor a view of it is referenced."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._shape, self._dtype = shape, dtype
        self._array: Array = np.empty(shape, dtype)
        self._lock = threading.Lock()

    def take(self) -> Array:
        """The array, or a new one while the last one is in use. Its content is undefined."""
        # Two threads that count at once would both find it unused.
        with self._lock:
            if self._references() != _UNUSED:
                self._array = np.empty(self._shape, self._dtype)
            return self._array

    def _references(self) -> int:
        return sys.getrefcount(self._array) if _COUNTED else 0


_COUNTED = sys.implementation.name == "cpython"
# Without reference counts an array counts as used: no array has this number of references.
_UNUSED = ReusedArray((), np.dtype(np.uint8))._references() if _COUNTED else -1


class BufferPool:
    """Copies of arrays, whose memory is used again after `give_back`.

    The pool never holds more memory than was in use at one time, whatever the shapes.
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
        while self._used_bytes + self._free_bytes > self._most_bytes:
            self._take(next(iter(self._free)))
        copied[...] = array
        return copied

    def give_back(self, copied: Array) -> None:
        """Release a copy."""
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


class SendWindow:
    """Notifications under way, with copies of their arrays, up to a number and a size."""

    def __init__(self, most_messages: int, most_bytes: int) -> None:
        self._most_messages, self._most_bytes = most_messages, most_bytes
        self._pool = BufferPool()
        self._under_way: deque[tuple[SendRequest, list[Array]]] = deque()
        self._bytes = 0

    def send(self, send: Callable[[list[Array]], SendRequest], arrays: Iterable[Any]) -> None:
        """Call `send` with copies of the arrays, which may be changed afterwards."""
        copies = [self._pool.copy(np.asarray(array)) for array in arrays]
        self._under_way.append((send(copies), copies))
        self._bytes += sum(array.nbytes for array in copies)

    def make_room(self, wait: Callable[[SendRequest], None]) -> None:
        """Release what has been sent; call `wait` for the oldest while too much is under way."""
        while self._under_way and self._under_way[0][0].done():
            self._release_oldest()
        while len(self._under_way) > self._most_messages or self._bytes > self._most_bytes:
            wait(self._under_way[0][0])
            self._release_oldest()

    def _release_oldest(self) -> None:
        _, copies = self._under_way.popleft()
        for copied in copies:
            self._bytes -= copied.nbytes
            self._pool.give_back(copied)
