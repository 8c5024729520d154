"""Memory that is used again: fresh memory of megabytes costs more than copying into it."""

from __future__ import annotations

import math
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

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int = 1) -> None:
        """`alignment` of its first element, in bytes."""
        self._shape, self._dtype, self._alignment = shape, dtype, alignment
        self._lock = threading.Lock()
        self._allocate()

    def _allocate(self) -> None:
        nbytes = math.prod(self._shape) * self._dtype.itemsize
        # The base of all views.
        self._memory: Any = np.empty(nbytes + self._alignment, np.uint8)
        start = -self._memory.ctypes.data % self._alignment
        self._array: Array = np.ndarray(self._shape, self._dtype, self._memory, start)

    def take(self) -> Array:
        """The array, or a new one while the last one is in use. Its content is undefined."""
        # Two threads that count at once would both find it unused.
        with self._lock:
            if self._references() != _UNUSED:
                self._allocate()
            return self._array

    def _references(self) -> int:
        return _count(self._array) + _count(self._memory)


_COUNTED = sys.implementation.name == "cpython"
_count: Callable[[object], int] = sys.getrefcount if _COUNTED else lambda _: 0
# Without reference counts an array counts as used: no array has this number of references.
_UNUSED = ReusedArray((), np.dtype(np.uint8))._references() or -1


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
        copied = self._take(kind)
        if copied is None:
            copied = np.empty(*kind)
        self._used_bytes += copied.nbytes
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        while self._free and self._used_bytes + self._free_bytes > self._most_bytes:
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

    def _take(self, kind: Kind) -> Array | None:
        # An interrupt may have left an empty list.
        free = self._free.get(kind, [])
        taken = free.pop() if free else None
        if not free:
            self._free.pop(kind, None)
        if taken is not None:
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
