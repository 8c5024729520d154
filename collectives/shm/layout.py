"""Layout of the shared memory of a node's ranks.

Every rank has a segment of the same layout. A word is written by one rank only. Words that are
polled at different times lie on different cache lines, so that a store does not invalidate the line
of an unrelated poll. Data of successive calls alternate between two locations (parity): a rank may
start the next call while a slower one still reads the present one's.

Stores become visible in program order on x86. On other processors `fence` is called before a word
is published and after it was read.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.reductions.reduction import Array
from collectives.shm.processes import process_namespace

# Indices of 8-byte words within a segment, a cache line apart (two on some processors).
PROGRESS = 0  # how far this rank is in the steps of a call
NUMBERS = (16, 32)  # two rows of numbers that the ranks exchange, alternating by step
MOST_NUMBERS = 16
VERDICTS = (48, 64)  # of the node's leader: the outcome of a call's comparison between nodes
COLLECTED = 80  # of the node's leader: the call for which its ranks have arrived
PROCESS = 96  # this process's number, and NAMESPACE in which it is valid
COMMITTED = 112  # the call from which this rank no longer withdraws
MISSING_NODES = 128  # of the node's leader: one bit for each node that is late
ENDED = 144  # 1 once an exception has ended a call of this rank
WITHDRAWN_AT = 160  # when this rank withdrew from a call, in nanoseconds
INTENDED = 176  # the asynchronous call that this rank's program waits for (`intents`)
NAMESPACE = 192

_CONTROL_BYTES = _PAGE_BYTES = 4096
SMALL_BYTES = 64 << 10
"""The most bytes of data in a slot, which has room for a row of addresses before them."""
ROW_BYTES = 64
"""The room of a row of addresses (`addresses`)."""
_HEADER_BYTES = 16
_SLOT_BYTES = SMALL_BYTES + 2 * ROW_BYTES
_SLOTS_AT = (_CONTROL_BYTES, _CONTROL_BYTES + _SLOT_BYTES)
ARRIVALS = (_SLOTS_AT[0] // 8, _SLOTS_AT[1] // 8)
DATA = _HEADER_BYTES // 8
"""The words from that of the arrival to the slot's data."""

_STAGES_AT = 256 << 10
STAGE_BYTES = 1 << 20
SEGMENT_BYTES = _STAGES_AT + 2 * STAGE_BYTES

# membarrier(2): its number by machine, and the command that orders all threads.
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "ppc64le": 365, "riscv64": 283, "s390x": 356}
_GLOBAL = 1


class NodeMemory:
    """The segments of all ranks of the node, as mapped by one of them."""

    def __init__(
        self, segments: Sequence[memoryview], rank: int, fence: Callable[[], None] | None
    ) -> None:
        self.rank, self.size = rank, len(segments)
        self.fence = fence
        self.words = [segment[:_STAGES_AT].cast("Q") for segment in segments]
        self.own = self.words[rank]
        self.others = [words for peer, words in enumerate(self.words) if peer != rank]
        self.stages = [
            [_bytes(each, at, STAGE_BYTES) for at in (_STAGES_AT, _STAGES_AT + STAGE_BYTES)]
            for each in segments
        ]
        self.slots = [
            [_bytes(each, at + _HEADER_BYTES, ROW_BYTES + SMALL_BYTES) for at in _SLOTS_AT]
            for each in segments
        ]

    def publish_process(self) -> None:
        """Publish this process's number, by which the others check whether it is alive.

        They can in the namespace of the number alone: containers number their own processes.
        """
        self.own[NAMESPACE] = process_namespace()
        self.own[PROCESS] = os.getpid()

    def touch_stages(self) -> None:
        """Touch every page of all stages, so that no later call has to fault one in."""
        for stages in self.stages:
            for stage in stages:
                stage[::_PAGE_BYTES].max()

    def stages_of(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """Every rank's two stages, as arrays of a dtype."""
        nbytes = STAGE_BYTES // dtype.itemsize * dtype.itemsize
        return [[stage[:nbytes].view(dtype) for stage in stages] for stages in self.stages]

    def publish(self, index: int, value: int) -> None:
        """Store a word of this rank, after all earlier stores."""
        if self.fence is not None:
            self.fence()
        self.own[index] = value

    def order_loads(self) -> None:
        """Order the loads that follow after those of the words that were read."""
        if self.fence is not None:
            self.fence()


def clear(segment: memoryview, fence: Callable[[], None] | None) -> None:
    """Zero the parts of an own segment that other ranks read before they are written."""
    segment[:_STAGES_AT] = bytes(_STAGES_AT)
    if fence is not None:
        fence()


def _bytes(segment: memoryview, start: int, nbytes: int) -> Array:
    return np.frombuffer(segment, np.uint8, nbytes, start)


def order_all_threads() -> bool:
    """Order the stores of all threads on the machine; False if the system does not support it."""
    number = _MEMBARRIER.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    return int(ctypes.CDLL(None).syscall(number, _GLOBAL, 0, 0)) == 0
