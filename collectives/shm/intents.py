"""Whether the programs of all the node's ranks wait in their next call, before they make it.

An asynchronous call that is made in the program's thread blocks the program. That is safe where all
ranks' programs wait in this call: another one may first need a message that this program sends
later. Or it computes, while the thread that makes its call waits for Python's lock (5 ms a turn).

All ranks find the same, though each waits for a limited time. A rank that has seen all others wait
commits itself, and looks once more. A rank that leaves stores so, and looks whether another has
committed itself, and then stays. Both store before they look, so that of two at least one sees the
other (Dekker's algorithm, as in `node_barrier`).
"""

from __future__ import annotations

import os
import threading
import time

from collectives.shm.layout import ARRIVALS, INTENDED, NodeMemory
from collectives.shm.node_barrier import SEQUENCE_MASK, has_arrived

_SEQUENCE_BITS, _UNMADE_BITS = 40, 20
_NUMBER_BITS = _SEQUENCE_BITS + _UNMADE_BITS
_WAITING, _COMMITTED, _QUEUED = (state << _NUMBER_BITS for state in (1, 2, 3))
_SEQUENCE = (1 << _SEQUENCE_BITS) - 1


class Intents:
    """One rank's side of it."""

    def __init__(self, memory: NodeMemory) -> None:
        self._memory, self._lock = memory, threading.Lock()
        self.unmade = 0
        """How many calls of the program have ended without a call that is counted."""

    def all_wait(self, sequence: int, seconds: float) -> bool:
        """Whether all programs wait in the call of that number, in which this one may wait then.

        False once some seconds have passed, or a rank makes the call in another thread, as this
        one has to then. Where it is True, `end` has to follow the call if it fails.
        """
        number, limit = self._number(sequence), time.monotonic() + seconds
        waiting, committed, queued = _WAITING | number, _COMMITTED | number, _QUEUED | number
        try:
            while True:
                self._memory.publish(INTENDED, waiting)
                leaves = False
                while not self._others_wait(waiting, committed):
                    if self._any(queued) or time.monotonic() > limit:
                        leaves = True
                        break
                    os.sched_yield()
                self._publish_first(queued if leaves else committed)
                if leaves:
                    if not self._any(committed):
                        return False
                elif self._others_wait(waiting, committed):
                    return True
        except BaseException:
            self._memory.publish(INTENDED, 0)
            raise

    def end(self) -> None:
        """Note that this rank waits no more in a call that others may not have made yet."""
        # Not where the call was withdrawn.
        if self._memory.own[INTENDED] >> _NUMBER_BITS == _COMMITTED >> _NUMBER_BITS:
            self._memory.publish(INTENDED, 0)

    def note_queued(self, sequence: int) -> None:
        """Note that the call of that number is not, or no more, made in the program's thread."""
        self._memory.publish(INTENDED, _QUEUED | self._number(sequence))

    def _number(self, sequence: int) -> int:
        # A rank that is past a call without a number doesn't take one in it for one in the next.
        return sequence | self.unmade % (1 << _UNMADE_BITS) << _SEQUENCE_BITS

    def _publish_first(self, word: int) -> None:
        """Store the word before any later load."""
        self._memory.publish(INTENDED, word)
        self._memory.order_loads()
        # An atomic operation, by which x86 orders them.
        with self._lock:
            pass

    def _any(self, word: int) -> bool:
        return word in [words[INTENDED] for words in self._memory.others]

    def _others_wait(self, waiting: int, committed: int) -> bool:
        for words in self._memory.others:
            intended = words[INTENDED]
            if intended != waiting and intended != committed and not self._in_call(words, waiting):
                return False
        return True

    def _in_call(self, words: memoryview, waiting: int) -> bool:
        """Whether a rank is in the call that the word names, by a call of its program."""
        sequence = waiting & _SEQUENCE
        if not has_arrived(words[ARRIVALS[sequence & 1]], sequence & SEQUENCE_MASK):
            return False
        self._memory.order_loads()
        # What was read before is older than the arrival.
        intended = words[INTENDED]
        queued = intended >> _NUMBER_BITS == _QUEUED >> _NUMBER_BITS
        return not queued or intended & _SEQUENCE != sequence
