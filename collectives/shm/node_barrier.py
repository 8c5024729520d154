"""How the ranks of a node meet in a call, and how one that is tired of waiting leaves again.

A rank comes by storing a word: the call's fingerprint, and the low bits of its number. All have
come and agree once every rank's word is the same as one's own, so that a meeting costs a store and
a comparison for each peer.

A rank whose deadline is over takes its word back, and the call counts as not made. It must not, if
a peer has seen the word in the meantime and gone on. Dekker's way: who leaves clears its word and
then looks whether all have come after all; who comes stores its word and then looks at the others'.
At least one of the two sees the other, provided that neither's load overtakes its store. The
leaving rank, which has time, orders both sides with the system call membarrier(2).

With more than two ranks, two may leave at once, and each see that the other one is absent, while a
third has seen the first before it left and the second after that. So who has seen all says that it
goes on, and looks once more; who leaves stays if anybody goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from collectives.errors import DeadlineExceededError, RankFailedError
from collectives.shm.layout import (
    ARRIVALS,
    COLLECTED,
    COMMITTED,
    ENDED,
    LEFT_AT,
    MISSING_NODES,
    PROCESS,
    VERDICTS,
    NodeMemory,
)
from collectives.shm.membarrier import order_all_threads
from collectives.waiting.wait_policy import WaitPolicy

SEQUENCE_BITS = 16
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1

ALIKE, DIFFERENT = 1, 2
"""What the leader of a node says after it has asked the other nodes."""

_GRACE_SECONDS = 2.0
# As many as a word has bits.
_NODES_NOTED = 64


def word_of(fingerprint: int, sequence: int) -> int:
    """What a rank stores when it comes."""
    return fingerprint << SEQUENCE_BITS | sequence & SEQUENCE_MASK


class NodeBarrier:
    """One rank's meetings with the others of its node."""

    def __init__(
        self,
        memory: NodeMemory,
        wait_policy: WaitPolicy,
        ranks: list[int],
        ranks_of: Callable[[list[int]], dict[int, str]],
    ) -> None:
        """`ranks` are the numbers of the node's ranks in the whole group, for messages.

        `ranks_of` gives those of several nodes.
        """
        self.memory, self._wait_policy, self._ranks = memory, wait_policy, ranks
        self._ranks_of = ranks_of
        self._waits_since = 0
        wait_policy.check_alive = self._check_alive

    def arrive(self, word: int, sequence: int) -> None:
        """Store the word."""
        self.memory.publish(ARRIVALS[sequence & 1], word)

    def wait_for_all(self, word: int, sequence: int, *, leave: bool = True) -> bool:
        """Wait for all the node's ranks; whether their words are alike.

        Where the deadline comes first, the word is taken back before the error is raised.
        """
        index = ARRIVALS[sequence & 1]
        others, spins = self.memory.others, self._wait_policy.spins
        self._waits_since = 0
        while True:
            alike = True
            for words in others:
                if words[index] == word:
                    continue
                for _ in range(spins):
                    if words[index] == word:
                        break
                else:
                    alike &= self._await(words, index, word, leave)
            if len(others) == 1 or self._commit(word, index):
                break
        if self.memory.fence is not None:
            self.memory.fence()
        return alike

    def _commit(self, word: int, index: int) -> bool:
        """Whether all are still here: one that was seen may have left since."""
        self.memory.publish(COMMITTED, word)
        if not self.absent(word, index):
            return True
        self.memory.publish(COMMITTED, 0)
        return False

    def _await(self, words: memoryview, index: int, word: int, leave: bool) -> bool:
        """Wait until one rank has come; whether its word is ours."""
        number = word & SEQUENCE_MASK
        self._waits_since = self._waits_since or time.monotonic_ns()

        def here() -> bool:
            return is_here(words[index], number)

        try:
            self._wait_policy.until(here, lambda: self._culprits(word, index))
        except DeadlineExceededError as error:
            while leave and not here():
                if self._withdraw(index, word):
                    error.withdrawn = True
                    raise
                # Somebody goes on, or all came in this moment.
                self._await_bound(lambda: here() or not self._bound_by_any(word), dict)
            if not leave:
                raise
        return words[index] == word

    def _withdraw(self, index: int, word: int) -> bool:
        """Take the word back; False where it stays, since somebody goes on."""
        self._take_back(index, word)
        if not order_all_threads():
            # The others may have seen it. It stays; the same call, made again, goes on from here.
            self.memory.publish(index, word)
            return True
        if self.absent(word, index) and not self._bound_by_any(word):
            return True
        self.memory.publish(index, word)
        return False

    def _take_back(self, index: int, word: int) -> None:
        self.memory.own[LEFT_AT] = time.monotonic_ns()
        self.memory.publish(index, word & SEQUENCE_MASK)

    def _bound_by_any(self, word: int) -> bool:
        number = word & SEQUENCE_MASK
        return any(is_here(words[COMMITTED], number) for words in self.memory.others)

    def absent(self, word: int, index: int) -> dict[int, str]:
        """Who has not come yet, or has left."""
        number = word & SEQUENCE_MASK
        return {
            self._ranks[peer]: ""
            for peer, words in enumerate(self.memory.words)
            if peer != self.memory.rank and not is_here(words[index], number)
        }

    def _culprits(self, word: int, index: int) -> dict[int, str]:
        """Of the absent those who never came, if any: others left because of them."""
        return self._never_came(word, index) or self.absent(word, index)

    def _never_came(self, word: int, index: int) -> dict[int, str]:
        """The absent but for those who have left since this rank began to wait.

        Who left before that, from a call that counts as not made, is absent from this one.
        """
        absent, number = self.absent(word, index), word & SEQUENCE_MASK
        left = {
            self._ranks[peer]
            for peer, words in enumerate(self.memory.words)
            if words[index] == number and words[LEFT_AT] > self._waits_since
        }
        return {rank: note for rank, note in absent.items() if rank not in left}

    def end(self) -> None:
        """Let the others know that this rank makes no call any more."""
        self.memory.publish(ENDED, 1)

    def _check_alive(self) -> None:
        problems = [
            f"rank {self._ranks[peer]} {problem}"
            for peer, words in enumerate(self.memory.words)
            if (problem := _problem(words)) is not None
        ]
        if problems:
            error = RankFailedError(
                f"{', '.join(problems)}; {self._wait_policy.call}, waited for it"
            )
            self._wait_policy.before_raise(error)
            raise error

    # Between the leader, which speaks with the other nodes, and the rest

    def collect(self, word: int, sequence: int) -> bool:
        """As the leader: wait for all, and bind them to the call; whether they are alike."""
        index = ARRIVALS[sequence & 1]
        while True:
            alike = self.wait_for_all(word, sequence)
            self.memory.publish(COLLECTED, word)
            if not self.absent(word, index):
                return alike
            self.memory.publish(COLLECTED, 0)

    def release(self) -> None:
        """As the leader: give the call up, so that the others may leave as well."""
        self.memory.publish(COLLECTED, 0)

    def note_missing(self, nodes: list[int]) -> None:
        """As the leader: let the others know which nodes are waited for."""
        self.memory.publish(MISSING_NODES, sum(1 << node for node in nodes if node < _NODES_NOTED))

    def _missing(self, word: int) -> dict[int, str]:
        """As one of the others: the ranks that the leader waits for, if it said so."""
        noted = self.memory.words[0][MISSING_NODES]
        nodes = [node for node in range(_NODES_NOTED) if noted >> node & 1]
        left = self.absent(word, ARRIVALS[word & 1])
        return self._ranks_of(nodes) or left or {self._ranks[0]: ", which waits for other nodes"}

    def tell(self, verdict: int, sequence: int) -> None:
        """As the leader: say what the other nodes said."""
        if self.memory.own[MISSING_NODES]:
            self.memory.publish(MISSING_NODES, 0)
        self.memory.publish(VERDICTS[sequence & 1], word_of(verdict, sequence))

    def wait_for_verdict(self, word: int, sequence: int) -> int:
        """As one of the others: wait for it."""
        leader, index = self.memory.words[0], VERDICTS[sequence & 1]
        number = sequence & SEQUENCE_MASK
        self._waits_since = time.monotonic_ns()

        def told() -> bool:
            return leader[index] & SEQUENCE_MASK == number and leader[index] > 0

        def absent() -> dict[int, str]:
            return self._never_came(word, ARRIVALS[sequence & 1]) or self._missing(word)

        try:
            self._wait_policy.until(told, absent)
        except DeadlineExceededError as error:
            while not told():
                if self._withdraw_leader(word, sequence):
                    error.withdrawn = True
                    raise
                # The leader is bound to the call until the other nodes come, or it gives up.
                self._await_bound(lambda: told() or not self._bound(sequence), absent)
        return int(leader[index]) >> SEQUENCE_BITS

    def _await_bound(self, ready: Callable[[], bool], absent: Callable[[], dict[int, str]]) -> None:
        """Wait on, since somebody counts on this rank, and goes on or gives up very soon.

        Where it does neither for another deadline and a little more, it may do so at any time.
        """
        try:
            self._wait_policy.until(ready, absent, _GRACE_SECONDS)
        except DeadlineExceededError as error:
            # Who limits the wait makes the same call again.
            error.withdrawn = self._wait_policy.limited
            raise

    def _bound(self, sequence: int) -> bool:
        return is_here(self.memory.words[0][COLLECTED], sequence & SEQUENCE_MASK)

    def _withdraw_leader(self, word: int, sequence: int) -> bool:
        """Take the word back; whether that came before the leader had counted this rank."""
        index = ARRIVALS[sequence & 1]
        self._take_back(index, word)
        if order_all_threads() and not self._bound(sequence):
            return True
        self.memory.publish(index, word)
        return False


def is_here(word: int, number: int) -> bool:
    """Whether it is the word of one who came to the call of that number, and has not left."""
    return word & SEQUENCE_MASK == number and word > SEQUENCE_MASK


def _problem(words: memoryview) -> str | None:
    """Why nothing more can come of a rank with these words, if that is so."""
    # A rank that has yet to sign in may just be slow.
    if words[PROCESS] and not is_alive(words[PROCESS]):
        return "has died"
    return "can't go on, since an exception ended a call there" if words[ENDED] else None


def is_alive(process: int) -> bool:
    """Whether the process runs; a killed one stays as a zombie until it is waited for."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except ProcessLookupError:  # waited for between opening and reading
        return False
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")
