"""Which of the node's ranks make their next call, and whether their program waits in it.

An asynchronous call that runs in the thread of the program blocks it until the others have come. It
is no worse than one in another thread only if the others' programs wait, too: a call that a rank
makes in another thread takes turns with what its program computes (Python's lock, 5 ms a turn).
Nothing else depends on these words.
"""

from __future__ import annotations

import os
import time

from collectives.shm.layout import ARRIVALS, INTENDED, NodeMemory
from collectives.shm.node_barrier import SEQUENCE_MASK, has_arrived

# Added to the number of a call that is made in another thread than the program's.
_QUEUED = 1 << 62


def all_come(memory: NodeMemory, sequence: int, seconds: float) -> bool:
    """Whether the programs of all the node's ranks wait in the call, or here, within that time.

    They then make it, whatever else each of them waits for. This rank has to make it next, too,
    even if not all come: others may have seen that it waited here. It makes it in another thread
    then. (A rank that leaves while another sees it here is waited for all the same.)
    """
    memory.publish(INTENDED, sequence)
    limit = time.monotonic() + seconds
    for words in memory.others:
        while not _waits(memory, words, sequence):
            if words[INTENDED] == sequence | _QUEUED or time.monotonic() > limit:
                note_queued(memory, sequence)
                return False
            os.sched_yield()
    return True


def note_queued(memory: NodeMemory, sequence: int) -> None:
    """Publish that this rank makes the call in another thread than the program's."""
    memory.publish(INTENDED, sequence | _QUEUED)


def withdraw(memory: NodeMemory) -> None:
    """Note that this rank does not make the call now, since it has waited too long in it."""
    memory.publish(INTENDED, 0)


def _waits(memory: NodeMemory, words: memoryview, sequence: int) -> bool:
    if words[INTENDED] == sequence:
        return True
    arrived = has_arrived(words[ARRIVALS[sequence & 1]], sequence & SEQUENCE_MASK)
    memory.order_loads()
    return arrived and words[INTENDED] != sequence | _QUEUED
