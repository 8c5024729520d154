"""Shards in memory that the workers of the host read without asking.

A shard begins with words. The first is its version, odd while the shard is being changed: a reader
copies, and looks whether the version was even and still is the same (a sequence lock; Boehm, "Can
seqlocks get along with programming language memory models?", 2012). Two words follow for each
worker: how many of its pushes to the shard have been applied, and how many of these have failed.
Each word has one writer, the server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.shm.segment import SegmentAddress, make_segment, map_segment, order
from strategies.parameter_server.requests import Place, ShardInfo

Array = NDArray[Any]

_ALIGNMENT = 64
_WORD_BYTES = 8
_SEGMENT_BYTES = 16 << 20


def _head_bytes(workers: int) -> int:
    return _rounded(_WORD_BYTES * (1 + 2 * workers))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _Part:
    """A shard's words and elements in some memory."""

    def __init__(
        self, memory: memoryview, shape: tuple[int, ...], dtype: np.dtype[Any], workers: int
    ) -> None:
        head = _head_bytes(workers)
        self.words = memory[:head].cast("Q")
        self.value: Array = np.ndarray(shape, dtype, memory[head:])


class ServedMemory:
    """Where a server puts its shards: segments, each for many small ones or one large."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._free = memoryview(b"")
        self._address: SegmentAddress | None = None
        self._start = 0
        self._kept: list[Any] = []

    def put(self, value: Array) -> ServedShard:
        """A shard with a copy of this value."""
        nbytes = _head_bytes(self._workers) + _rounded(value.nbytes)
        memory, place = self._take(nbytes)
        part = _Part(memory, value.shape, value.dtype, self._workers)
        part.value[...] = value
        return ServedShard(part, place)

    def _take(self, nbytes: int) -> tuple[memoryview, Place | None]:
        if nbytes > len(self._free):
            segment = make_segment(max(nbytes, _SEGMENT_BYTES))
            if segment is None:
                return memoryview(bytearray(nbytes)), None
            self._kept.append(segment)
            self._free, self._address, self._start = segment.memory, segment.address, 0
        assert self._address is not None
        memory, place = self._free[:nbytes], Place(self._address, self._start)
        self._free, self._start = self._free[nbytes:], self._start + nbytes
        return memory, place


class ServedShard:
    """A shard as its server sees it."""

    def __init__(self, part: _Part, place: Place | None) -> None:
        self.value, self._words, self.place = part.value, part.words, place

    @contextmanager
    def changing(self, worker: int) -> Iterator[None]:
        """Within it readers wait; what is raised counts as a failed push of the worker."""
        words, applied = self._words, 1 + 2 * worker
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


class MappedShard:
    """A shard in another process's memory."""

    def __init__(self, part: _Part, worker: int) -> None:
        self._words, self._value = part.words, part.value
        self._applied = 1 + 2 * worker

    @property
    def applied(self) -> int:
        """How many pushes of this worker have been applied."""
        return self._words[self._applied]

    @property
    def failed(self) -> int:
        """How many of these have failed."""
        return self._words[self._applied + 1]

    @property
    def settled(self) -> bool:
        """Whether nobody is changing it just now."""
        return not self._words[0] & 1

    def copy_to(self, out: Array, rows: Array | None = None) -> bool:
        """Copy it, or some rows; False where it was changed meanwhile, and `out` is of no use."""
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


class MappedMemory:
    """The segments of servers that this worker could map."""

    def __init__(self, worker: int, workers: int) -> None:
        self._worker, self._workers = worker, workers
        self._maps: dict[SegmentAddress, memoryview | None] = {}

    def find(self, info: ShardInfo) -> MappedShard | None:
        """The shard; None where its memory can't be reached."""
        if info.place is None:
            return None
        address, start = info.place
        if address not in self._maps:
            self._maps[address] = map_segment(address)
        memory = self._maps[address]
        if memory is None:
            return None
        nbytes = _head_bytes(self._workers) + math.prod(info.shape) * info.dtype.itemsize
        part = _Part(memory[start : start + nbytes], info.shape, info.dtype, self._workers)
        return MappedShard(part, self._worker)
