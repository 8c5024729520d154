"""Which of the node's ranks make their next call, before they make it.

A rank that must not wait for the others in a call, because one of them may wait for it, finds so
that it would not wait for long. Nothing else depends on these words.
"""

from __future__ import annotations

import os
import time

from collectives.shm.layout import ARRIVALS, INTENDED, NodeMemory
from collectives.shm.node_barrier import SEQUENCE_MASK, has_arrived


def all_come(memory: NodeMemory, sequence: int, seconds: float) -> bool:
    """Whether all the node's ranks arrive at the call, or wait here, within that time.

    They then make it, whatever else each of them waits for. This rank has to make it next, too,
    even if not all come: others may have seen that it waited here.
    """
    number, index = sequence & SEQUENCE_MASK, ARRIVALS[sequence & 1]
    memory.publish(INTENDED, sequence)
    limit = time.monotonic() + seconds
    for words in memory.others:
        while not (words[INTENDED] == sequence or has_arrived(words[index], number)):
            if time.monotonic() > limit:
                return False
            os.sched_yield()
    return True


def withdraw(memory: NodeMemory) -> None:
    """Note that this rank does not make the call now, since it has waited too long in it."""
    memory.publish(INTENDED, 0)
