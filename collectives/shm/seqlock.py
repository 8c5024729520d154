"""Arrays in memory that other processes of the host read at any time, without a message.

An array is preceded by words. The first is its version, odd while the array is being changed: a
reader copies the array, and checks that the version was even before and is the same afterwards (a
sequence lock; Boehm, "Can seqlocks get along with programming language memory models?", 2012). Two
words follow for each client: how many of its changes have been applied, and how many of these
failed. Each word has one writer, the owner of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.shm.segment import SegmentAddress, make_segment, map_segment, order

Array = NDArray[Any]

_ALIGNMENT = 64
_WORD_BYTES = 8
_SEGMENT_BYTES = 16 << 20


class ArrayAddress(NamedTuple):
    """Where an array lies in the memory of its owner. Picklable."""

    segment: SegmentAddress
    start: int


class SharedArray:
    """An array as its owner has it. `address` is None where other processes can't map it."""

    def __init__(self, words: memoryview, value: Array, address: ArrayAddress | None) -> None:
        self._words, self.value, self.address = words, value, address

    @contextmanager
    def changing(self, client: int) -> Iterator[None]:
        """Within it readers wait; an exception counts as a failed change of the client."""
        words, applied = self._words, 1 + 2 * client
        words[0] += 1
        order()
        try:
            yield
        except BaseException:
            words[applied + 1] += 1
            raise
        finally:
            words[applied] += 1
            order()
            words[0] += 1


class SharedArrays:
    """The owner's arrays, in segments that each hold many small arrays or one large one."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._free = memoryview(b"")
        self._segment: SegmentAddress | None = None
        self._start = 0
        self._kept: list[Any] = []

    def put(self, value: Array) -> SharedArray:
        """A shared array with a copy of this value."""
        nbytes = _head_bytes(self._clients) + _rounded(value.nbytes)
        memory, address = self._take(nbytes)
        words, own = _parts_of(memory, value.shape, value.dtype, self._clients)
        own[...] = value
        return SharedArray(words, own, address)

    def _take(self, nbytes: int) -> tuple[memoryview, ArrayAddress | None]:
        if nbytes > len(self._free):
            segment = make_segment(max(nbytes, _SEGMENT_BYTES))
            if segment is None:
                return memoryview(bytearray(nbytes)), None
            self._kept.append(segment)
            if nbytes >= _SEGMENT_BYTES:
                # Small ones go on in theirs.
                return segment.memory[:nbytes], ArrayAddress(segment.address, 0)
            self._free, self._segment, self._start = segment.memory, segment.address, 0
        assert self._segment is not None
        memory, address = self._free[:nbytes], ArrayAddress(self._segment, self._start)
        self._free, self._start = self._free[nbytes:], self._start + nbytes
        return memory, address


class MappedArray:
    """An array in another process's memory, as one client reads it."""

    def __init__(self, words: memoryview, value: Array, client: int) -> None:
        self._words, self._value, self._applied = words, value, 1 + 2 * client

    @property
    def applied(self) -> int:
        """How many changes of this client have been applied."""
        return self._words[self._applied]

    @property
    def failed(self) -> int:
        """How many of these have failed."""
        return self._words[self._applied + 1]

    @property
    def settled(self) -> bool:
        """Whether the array is not being changed at this moment."""
        return not self._words[0] & 1

    def copy_to(self, out: Array, rows: Array | None) -> bool:
        """Copy the array, or some rows; False, with `out` undefined, where it changed meanwhile."""
        version = self._words[0]
        if version & 1:
            return False
        order()
        if rows is None:
            np.copyto(out, self._value)
        else:
            # "clip" spares a buffer; the numbers have been checked.
            np.take(self._value, rows, axis=0, out=out, mode="clip")
        order()
        return bool(self._words[0] == version)


class MappedArrays:
    """Other processes' arrays that this client could map."""

    def __init__(self, client: int, clients: int) -> None:
        self._client, self._clients = client, clients
        self._maps: dict[SegmentAddress, memoryview | None] = {}

    def find(
        self, address: ArrayAddress | None, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> MappedArray | None:
        """The array; None where its memory can't be mapped."""
        if address is None:
            return None
        if address.segment not in self._maps:
            self._maps[address.segment] = map_segment(address.segment)
        memory = self._maps[address.segment]
        if memory is None:
            return None
        nbytes = _head_bytes(self._clients) + math.prod(shape) * dtype.itemsize
        part = memory[address.start : address.start + nbytes]
        return MappedArray(*_parts_of(part, shape, dtype, self._clients), self._client)


def _parts_of(
    memory: memoryview, shape: tuple[int, ...], dtype: np.dtype[Any], clients: int
) -> tuple[memoryview, Array]:
    """The words and the elements of an array in some memory."""
    head = _head_bytes(clients)
    return memory[:head].cast("Q"), np.ndarray(shape, dtype, memory[head:])


def _head_bytes(clients: int) -> int:
    return _rounded(_WORD_BYTES * (1 + 2 * clients))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
