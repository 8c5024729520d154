"""Barrier of one of several nodes, whose leader compares the call with those of the other nodes.

Every rank of the node arrives as in `node_barrier`. The leader, which is the node's first rank,
commits them all to the call, exchanges words with the other nodes' leaders (`consistency`), and
publishes the verdict. A rank may withdraw until it is committed, and again once the leader has
abandoned the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from collectives.errors import DeadlineExceededError
from collectives.shm.layout import (
    ARRIVALS,
    COLLECTED,
    MISSING_NODES,
    VERDICTS,
    NodeMemory,
    order_all_threads,
)
from collectives.shm.node_barrier import (
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    NodeBarrier,
    has_arrived,
    word_of,
)
from collectives.waiting.wait_policy import WaitPolicy

ALIKE, DIFFERENT = 1, 2
"""Verdict of the node's leader after its exchange with the other nodes."""

_NODES_NOTED = 64  # the bits of a word


class VerdictBarrier(NodeBarrier):
    """One rank's side of the barrier, with the leader's verdict."""

    def __init__(
        self,
        memory: NodeMemory,
        wait_policy: WaitPolicy,
        ranks: list[int],
        ranks_of: Callable[[list[int]], dict[int, str]],
    ) -> None:
        """As a node's barrier; `ranks_of` returns the ranks of several nodes, for messages."""
        super().__init__(memory, wait_policy, ranks)
        self._ranks_of = ranks_of

    def collect(self, word: int, sequence: int) -> bool:
        """As the leader: wait for all, and commit them to the call; whether their words agree."""
        return self._gather(word, sequence, COLLECTED)

    def collect_soon(self, word: int, sequence: int) -> bool:
        """As `collect`, if all soon arrive with that word; else False, and `collect` goes on."""
        memory, poll, index = self.memory, self.poll, ARRIVALS[sequence & 1]
        for words in memory.others:
            if words[index] != word and not poll(words, index, word):
                return False
        memory.publish(COLLECTED, word)
        for words in memory.others:
            if words[index] != word:
                memory.publish(COLLECTED, 0)
                return False
        memory.order_loads()
        return True

    def release(self) -> None:
        """As the leader: abandon the call, so that the other ranks may withdraw as well."""
        self.memory.publish(COLLECTED, 0)

    def publish_missing(self, nodes: list[int]) -> None:
        """As the leader: publish the nodes that are waited for."""
        self.memory.publish(MISSING_NODES, sum(1 << node for node in nodes if node < _NODES_NOTED))

    def _missing(self, word: int) -> dict[int, str]:
        """As another rank: the ranks that the leader waits for, if it published them."""
        noted = self.memory.words[0][MISSING_NODES]
        nodes = [node for node in range(_NODES_NOTED) if noted >> node & 1]
        absent = self.absent(word, ARRIVALS[word & 1])
        return self._ranks_of(nodes) or absent or {self._ranks[0]: ", which waits for other nodes"}

    def publish_verdict(self, verdict: int, sequence: int) -> None:
        """As the leader: publish the result of the exchange between nodes."""
        if self.memory.own[MISSING_NODES]:
            self.memory.publish(MISSING_NODES, 0)
        self.memory.publish(VERDICTS[sequence & 1], word_of(verdict, sequence))

    def wait_for_verdict(self, word: int, sequence: int, *, in_transit: bool = False) -> int:
        """As another rank: wait for the leader's verdict.

        `in_transit`: much data travels with the nodes' words, and the leader moves it.
        """
        leader, index = self.memory.words[0], VERDICTS[sequence & 1]
        number = sequence & SEQUENCE_MASK
        self._waits_since = time.monotonic_ns()
        if self.poll(leader, index, word_of(ALIKE, sequence)):
            self.memory.order_loads()
            return ALIKE

        def published() -> bool:
            return leader[index] & SEQUENCE_MASK == number and leader[index] > 0

        def absent() -> dict[int, str]:
            return self._never_arrived(word, ARRIVALS[sequence & 1]) or self._missing(word)

        wait_policy = self._wait_policy
        try:
            wait_policy.until(published, absent, in_transit=in_transit)
        except DeadlineExceededError as error:
            while not published():
                if self._withdraw_leader(word, sequence):
                    error = wait_policy.renewed(error, absent)
                    error.withdrawn = True
                    raise error from None
                if not order_all_threads():
                    # The leader may have counted this rank: the call is undecided.
                    error.withdrawn = wait_policy.limit is not None
                    raise
                # The leader is committed to the call until the other nodes arrive, or it abandons.
                self._await_bound(lambda: published() or not self._committed(sequence), absent)
        self.memory.order_loads()
        return int(leader[index]) >> SEQUENCE_BITS

    def _committed(self, sequence: int) -> bool:
        return has_arrived(self.memory.words[0][COLLECTED], sequence & SEQUENCE_MASK)

    def _withdraw_leader(self, word: int, sequence: int) -> bool:
        """Withdraw the word; whether that happened before the leader had counted this rank."""
        index = ARRIVALS[sequence & 1]
        self._take_back(index, word)
        if order_all_threads() and not self._committed(sequence):
            return True
        self.memory.publish(index, word)
        return False
