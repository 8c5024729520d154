"""The memory of simulated GPUs, and the host's pinned memory, which are reused as soon as possible.

As in CuPy's pools: a block that no array holds any more is free at once for allocations on the
stream for which it was allocated, in the order of that stream; pinned memory is free for all. Work
that was enqueued holds no memory. What is freed is overwritten first, so that work in another
order than that of the stream reads garbage.
"""

import bisect
import threading
import weakref
from collections import defaultdict

import numpy as np

from tests.devices.simulated_arrays import address_of

GARBAGE = 0xAB
ALIGNMENT = 256


class _Block:
    """Memory at an address with the GPU's alignment, of which an array holds `nbytes`, or none."""

    def __init__(self, capacity, stream):
        memory = np.full(capacity + ALIGNMENT, GARBAGE, np.uint8)
        start = -address_of(memory) % ALIGNMENT
        self.memory, self.begin = memory[start : start + capacity], address_of(memory) + start
        self.stream, self.nbytes, self.settled = stream, 0, True

    def overwrite(self):
        self.memory[...] = GARBAGE
        self.settled = True


class Pool:
    """Blocks, each of one stream, or of none in the host's memory."""

    def __init__(self):
        self._lock, self._free = threading.Lock(), defaultdict(list)
        self._blocks = []  # sorted

    def allocate(self, nbytes, stream=None, *, settled=False):
        """An array of at least so many bytes of garbage, and the same memory, which holds nothing.

        `settled`: it may be written at once, not in the stream's order.
        """
        capacity = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        block = self._reuse(self._free[stream, capacity], settled)
        if block is None:
            block = _Block(capacity, stream)
            with self._lock:
                bisect.insort(self._blocks, block, key=lambda each: each.begin)
        block.nbytes = nbytes
        # The base of all views of it, since a memoryview is no array.
        held = np.frombuffer(memoryview(block.memory), np.uint8)
        weakref.finalize(held, self._release, block).atexit = False
        return held, block.memory

    def _reuse(self, free, settled):
        try:
            block = free.pop()
        except IndexError:  # other threads allocate, too
            return None
        if settled and not block.settled:
            free.append(block)
            return None
        return block

    # Runs where the last array dies, also within other methods: it must take no lock.
    def _release(self, block):
        block.nbytes, block.settled = 0, False
        if block.stream is None:
            block.overwrite()
        else:
            block.stream.discard(block.overwrite)
        self._free[block.stream, block.memory.nbytes].append(block)

    def owns(self, address, nbytes):
        """Whether all of it is memory of one array that has not been freed."""
        with self._lock:
            index = bisect.bisect_right(self._blocks, address, key=lambda each: each.begin)
            block = self._blocks[index - 1] if index else None
        return block is not None and address + nbytes <= block.begin + block.nbytes

    def close(self):
        self._blocks.clear()
        self._free.clear()
