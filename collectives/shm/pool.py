"""Registered arrays: memory of the node's ranks that every rank can read and write.

Windows are divided into blocks, at the same offset in every rank's window, so that one number
locates an array on all ranks. Ranks release an array independently. Its block is reused once every
rank has released it; the ranks exchange this at the next allocation.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.reductions.reduction import Array
from collectives.shm.free_blocks import FreeBlocks
from collectives.transports.base import Transport

Gather = Callable[[list[int]], list[list[int]]]

ALIGNMENT = 4096
"""Alignment of the blocks, and of reserved memory, in bytes."""
_SMALLEST_WINDOW = 16 << 20
_OFFSET_BITS = 48


class Window:
    """One shared window, and its free blocks."""

    def __init__(self, shared: list[memoryview], rank: int) -> None:
        self.shared = shared
        self.segments = [np.frombuffer(segment, np.uint8) for segment in shared]
        self.own = self.segments[rank]
        self.address: int = self.own.ctypes.data
        self.nbytes = len(self.own)
        self.reserved = 0
        """End of the reserved memory; blocks are allocated from the start of the window."""
        self.blocks = FreeBlocks(self.nbytes)


class Pool:
    """The registered arrays of one rank; every rank of the node allocates in the same order."""

    def __init__(self, transport: Transport, gather: Gather, *, common: bool = False) -> None:
        """`transport` connects the node's ranks, `gather` exchanges lists of numbers. Collective.

        `common`: all ranks have the same array in the same memory, instead of one each.
        """
        self._transport, self._gather, self._common = transport, gather, common
        self._share = transport.share_one if common else transport.share
        self._rank = 0 if common else transport.rank
        self._windows: list[Window] = []
        self._by_address: list[tuple[int, int]] = []
        self._blocks: dict[int, tuple[Window, int, int]] = {}
        self._released: set[int] = set()
        self._allocated = 0
        self.in_use = False
        """Whether any registered array was ever made: the same on all ranks."""

    def allocate(self, nbytes: int) -> Array | None:
        """Bytes of this rank's window, at the same offset on all ranks; None if memory is short."""
        self._reclaim()
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        block_at = self._take(size) or self._grow(size)
        if block_at is None:
            return None
        window, start = block_at
        stop = start + size
        if stop > window.reserved:
            # On all ranks or on none.
            if not self._reserve(window.shared[self._rank][window.reserved : stop]):
                window.blocks.give_back(start, size)
                return None
            window.reserved = stop
        number = self._allocated = self._allocated + 1
        self.in_use = True
        self._blocks[number] = (window, start, size)
        block: Array = np.frombuffer(window.own.data, np.uint8, nbytes, start)
        weakref.finalize(block, self._released.add, number).atexit = False
        return block

    def _take(self, nbytes: int) -> tuple[Window, int] | None:
        for window in self._windows:
            start = window.blocks.take(nbytes)
            if start is not None:
                return window, start
        return None

    def _grow(self, nbytes: int) -> tuple[Window, int] | None:
        """Create a window at least as large as all present ones, so that there are few."""
        held = sum(window.nbytes for window in self._windows)
        wanted = max(nbytes, _SMALLEST_WINDOW, held)
        segments = self._share(wanted)
        if segments is None and wanted > nbytes:
            segments = self._share(nbytes)
        if segments is None:
            return None
        window = Window(segments, self._rank)
        self._windows.append(window)
        self._by_address = sorted((each.address, at) for at, each in enumerate(self._windows))
        start = window.blocks.take(nbytes)
        assert start is not None
        return window, start

    def _reserve(self, memory: memoryview) -> bool:
        if self._common:
            # One part for each rank, which the system then allocates close to its core.
            part = -(-len(memory) // (self._transport.size * ALIGNMENT)) * ALIGNMENT
            memory = memory[self._transport.rank * part :][:part]
        return self._transport.reserve(memory)

    def _reclaim(self) -> None:
        """Free the blocks that every rank has released."""
        if not self._blocks:
            return
        released = self._gather(sorted(self._released.copy()))
        for number in set(released[0]).intersection(*released[1:]):
            window, start, nbytes = self._blocks.pop(number)
            window.blocks.give_back(start, nbytes)
            self._released.discard(number)

    def close(self) -> None:
        """Free the windows without arrays on any rank. Collective.

        Other windows stay until the process ends: an array may outlive its communicator.
        """
        self._reclaim()
        for window in self._windows:
            if window.blocks.empty:
                self._transport.free(window.shared)
        self._windows, self._by_address = [], []

    def locate(self, address: int, nbytes: int) -> int:
        """A positive number that locates memory in this rank's windows, valid for every rank's.

        0 if the memory is not registered.
        """
        if not self._by_address or not nbytes:
            return 0
        index_at = bisect_right(self._by_address, (address, len(self._windows))) - 1
        if index_at < 0:
            return 0
        start, index = self._by_address[index_at]
        offset = address - start
        if offset + nbytes > self._windows[index].nbytes:
            return 0
        return (index + 1) << _OFFSET_BITS | offset

    def view(self, location: int, peer: int, length: int, dtype: np.dtype[Any]) -> Array:
        """A rank's array at a location."""
        segment = self._windows[(location >> _OFFSET_BITS) - 1].segments[peer]
        offset = location & ((1 << _OFFSET_BITS) - 1)
        return segment[offset : offset + length * dtype.itemsize].view(dtype)
