"""Intra-node barrier with timeout and withdrawal.

A rank arrives by storing a word: the call's fingerprint, and the low bits of its number. All ranks
have arrived and agree once every rank's word equals one's own. The barrier costs one store, and one
comparison for each peer.

A rank whose deadline has passed withdraws its word, and the call counts as not made. It must not
withdraw if a peer has read the word and continued. This is Dekker's algorithm: a withdrawing rank
clears its word and then checks whether all have arrived after all; an arriving rank stores its word
and then reads the others'. At least one of the two detects the other, provided that neither's load
overtakes its store. The withdrawing rank orders both sides with membarrier(2), because it is not
time-critical.

With more than two ranks, two may withdraw at once and each find the other one absent, while a third
has seen the first before and the second after its withdrawal. Therefore a rank that has seen every
word publishes that it continues, and checks once more; a withdrawing rank stays if any rank
continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from collectives.errors import DeadlineExceededError, RankFailedError
from collectives.shm.layout import (
    ARRIVALS,
    COMMITTED,
    ENDED,
    NAMESPACE,
    PROCESS,
    WITHDRAWN_AT,
    NodeMemory,
    order_all_threads,
)
from collectives.shm.processes import is_alive
from collectives.waiting.wait_policy import WaitPolicy

SEQUENCE_BITS = 16
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1

GRACE_SECONDS = 2.0


def word_of(fingerprint: int, sequence: int) -> int:
    """The word that a rank stores to arrive."""
    return fingerprint << SEQUENCE_BITS | sequence & SEQUENCE_MASK


class NodeBarrier:
    """One rank's side of the barrier."""

    def __init__(self, memory: NodeMemory, wait_policy: WaitPolicy, ranks: list[int]) -> None:
        """`ranks` are the numbers of the node's ranks in the whole group, for messages."""
        self.memory, self._wait_policy, self._ranks = memory, wait_policy, ranks
        self.poll = wait_policy.poll_word
        """(words, index, word): whether the word is there after a few polls."""
        self._waits_since = 0
        wait_policy.check_alive = self._check_alive

    def arrive(self, word: int, sequence: int) -> None:
        """Store the word."""
        self.memory.publish(ARRIVALS[sequence & 1], word)

    def wait_for_all(self, word: int, sequence: int) -> bool:
        """Wait for all the node's ranks; whether their words are equal.

        At the deadline the word is withdrawn before the error is raised.
        """
        # Of two ranks, the one that withdraws sees itself whether the other one has arrived.
        return self._gather(word, sequence, COMMITTED if len(self.memory.others) > 1 else None)

    def _gather(self, word: int, sequence: int, committed: int | None) -> bool:
        """Wait for all ranks, and publish in that place that this one continues."""
        index, self._waits_since = ARRIVALS[sequence & 1], 0
        while True:
            for words in self.memory.others:
                if words[index] != word and not self.poll(words, index, word):
                    self._await(words, index, word)
            if committed is not None:
                self.memory.publish(committed, word)
            alike = self._compare(word, index)
            if alike is not None:
                # Every call comes here: a function of its own would take longer.
                if self.memory.fence is not None:
                    self.memory.fence()
                return alike
            if committed is not None:
                self.memory.publish(committed, 0)

    def _compare(self, word: int, index: int) -> bool | None:
        """Whether all words are equal; None if a rank that was seen has withdrawn since.

        A rank that has withdrawn may have arrived again, at another call of the same number.
        """
        # In most calls all words are equal, which is quicker to see.
        for words in self.memory.others:
            if words[index] != word:
                break
        else:
            return True
        seen, number = [words[index] for words in self.memory.others], word & SEQUENCE_MASK
        if not all(has_arrived(each, number) for each in seen):
            return None
        return all(each == word for each in seen)

    def _await(self, words: memoryview, index: int, word: int) -> None:
        """Wait until one rank has arrived."""
        number = word & SEQUENCE_MASK
        self._waits_since = self._waits_since or time.monotonic_ns()

        def arrived() -> bool:
            return has_arrived(words[index], number)

        try:
            # One deadline for all ranks that this wait is for, one after the other.
            start = self._waits_since / 1e9
            self._wait_policy.until(arrived, lambda: self._late(word, index), start=start)
        except DeadlineExceededError as error:
            while not arrived():
                if not order_all_threads():
                    # Others may have read the word, and the data of the call: it is undecided.
                    error.withdrawn = self._wait_policy.limit is not None
                    raise
                if self._withdraw(index, word):
                    error.withdrawn = True
                    raise
                # A rank continues, or all ranks have arrived at this moment.
                self._await_bound(lambda: arrived() or not self._any_committed(word), dict)

    def _await_bound(self, ready: Callable[[], bool], absent: Callable[[], dict[int, str]]) -> None:
        """Continue to wait, because a rank relies on this one and will continue or abandon soon.

        After another deadline plus the grace period, the error leaves the call undecided.
        """
        try:
            self._wait_policy.until(ready, absent, GRACE_SECONDS)
        except DeadlineExceededError as error:
            # The caller that limits the wait repeats the same call.
            error.withdrawn = self._wait_policy.limit is not None
            raise

    def _withdraw(self, index: int, word: int) -> bool:
        """Withdraw the word; False if it stays because a rank continues."""
        self._take_back(index, word)
        order_all_threads()
        if self.absent(word, index) and not self._any_committed(word):
            return True
        self.memory.publish(index, word)
        return False

    def _take_back(self, index: int, word: int) -> None:
        self.memory.own[WITHDRAWN_AT] = time.monotonic_ns()
        self.memory.publish(index, word & SEQUENCE_MASK)

    def _any_committed(self, word: int) -> bool:
        number = word & SEQUENCE_MASK
        return any(has_arrived(words[COMMITTED], number) for words in self.memory.others)

    def absent(self, word: int, index: int) -> dict[int, str]:
        """The ranks that have not arrived, or have withdrawn."""
        number = word & SEQUENCE_MASK
        return {
            self._ranks[peer]: ""
            for peer, words in enumerate(self.memory.words)
            if peer != self.memory.rank and not has_arrived(words[index], number)
        }

    def _late(self, word: int, index: int) -> dict[int, str]:
        """The ranks that never arrived; if there are none, those that withdrew."""
        return self._never_arrived(word, index) or self.absent(word, index)

    def _never_arrived(self, word: int, index: int) -> dict[int, str]:
        """The absent ranks, except those that have withdrawn since this rank began to wait.

        A rank that withdrew earlier, from a call that counts as not made, is absent from this one.
        """
        absent, number = self.absent(word, index), word & SEQUENCE_MASK
        withdrawn = {
            self._ranks[peer]
            for peer, words in enumerate(self.memory.words)
            if words[index] == number and words[WITHDRAWN_AT] > self._waits_since
        }
        return {rank: note for rank, note in absent.items() if rank not in withdrawn}

    def end(self) -> None:
        """Publish that this rank makes no further call."""
        self.memory.publish(ENDED, 1)

    def _check_alive(self) -> None:
        problems = [
            f"{self._wait_policy.name(self._ranks[peer])} {problem}"
            for peer, words in enumerate(self.memory.words)
            if (problem := _problem(words, self.memory.own)) is not None
        ]
        if problems:
            error = RankFailedError(
                f"{', '.join(problems)}; {self._wait_policy.call}, waited for it"
            )
            self._wait_policy.before_raise(error)
            raise error


def has_arrived(word: int, number: int) -> bool:
    """Whether the word's rank has arrived at the call of that number and not withdrawn."""
    return word & SEQUENCE_MASK == number and word > SEQUENCE_MASK


def _problem(words: memoryview, own: memoryview) -> str | None:
    """Why a rank with these words can't continue, or None."""
    # A rank that has not yet published its process may just be slow.
    process = words[PROCESS] if words[NAMESPACE] == own[NAMESPACE] else 0
    if process and not is_alive(process):
        return "has died"
    return "can't go on, since an exception ended a call there" if words[ENDED] else None
