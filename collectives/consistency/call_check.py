"""Check, before any data move, that all ranks of a group make the same call.

The ranks of a node synchronize in shared memory (`shm.node_barrier`). With several nodes, the
lowest rank of each node then compares with those of the other nodes (`nodes_check`), and publishes
the verdict on its node. Ranks that share no memory count as a node each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from collectives.consistency.dissemination import Exchange
from collectives.consistency.nodes_check import NodesCheck
from collectives.consistency.signature import Signature, fingerprint
from collectives.errors import DeadlineExceededError, MismatchError
from collectives.shm.intents import Intents
from collectives.shm.layout import ROW_BYTES, SMALL_BYTES
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK, NodeBarrier
from collectives.shm.verdict_barrier import ALIKE, DIFFERENT, VerdictBarrier
from collectives.transports.base import Transport
from collectives.waiting.wait_policy import WaitPolicy


class CallCheck:
    """One rank's side of the check."""

    def __init__(
        self,
        wait_policy: WaitPolicy,
        node_barrier: NodeBarrier | None,
        leaders: Transport | None,
        members: list[list[int]],
        describe: Callable[[Signature], MismatchError],
    ) -> None:
        """`node_barrier` is None where no ranks share a node, `leaders` connects the nodes.

        With several nodes it is a VerdictBarrier. `leaders` is None with one node, and on ranks
        that do not lead theirs. `members` holds the ranks of each node. `describe` exchanges every
        rank's call after a mismatch.
        """
        self._wait_policy, self.node_barrier, self._leaders = wait_policy, node_barrier, leaders
        self.members, self.nodes, self._describe = members, len(members), describe
        self.verdicts = node_barrier if isinstance(node_barrier, VerdictBarrier) else None
        """The barrier of one of several nodes; None with one, and where no ranks share a node."""
        self.nodes_check = (
            None if leaders is None else NodesCheck(leaders, wait_policy, self._absent)
        )
        """The comparison between nodes, of the rank that leads one of several; None on others."""
        self._alone = self.nodes_check if node_barrier is None else None
        self.slots = _slots(node_barrier) if self.nodes > 1 else []
        """The memory of this node's ranks, by parity of the call, for data that travel with it."""
        self.intents = (
            None if node_barrier is None or self.nodes > 1 else Intents(node_barrier.memory)
        )
        """Whether all programs wait in the next call; None where not all ranks share memory."""
        self.sequence = 0
        """Number of the last call that was made, or that other ranks may have seen."""

    def check(self, signature: Signature) -> None:
        """Return when every rank has made this call.

        Raises a MismatchError on every rank if the ranks made different calls, which are over then.
        Raises DeadlineExceededError if not all arrived in time: the call counts as not made.
        """
        self.check_word(signature, fingerprint(signature.agreed) << SEQUENCE_BITS)

    def check_word(self, signature: Signature, base: int, exchange: Exchange | None = None) -> None:
        """Like `check`, for a caller that has already shifted the fingerprint to its position.

        Data that the nodes exchange with it may be read from then on until the next call.
        """
        sequence = self.sequence + 1
        if exchange is not None:
            call = self._wait_policy.call
            call.what, call.sequence = signature, sequence
            exchange.store(sequence & 1)
        # Set before any other rank can see the call, because errors are judged by it from here on.
        self.sequence = sequence
        self.check_counted(signature, base | sequence & SEQUENCE_MASK, exchange)

    def check_counted(
        self,
        signature: Signature,
        word: int,
        exchange: Exchange | None = None,
        *,
        swapped: bool = False,
    ) -> None:
        """Like `check_word`, for a caller that has counted the call and stored its data.

        `swapped`: as for `NodesCheck.agree`; the ranks of the node are collected then.
        """
        sequence, wait_policy = self.sequence, self._wait_policy
        call = wait_policy.call
        call.what, call.sequence = signature, sequence
        try:
            if self._alone is None:
                alike = self._check(word, sequence, exchange, swapped)
            else:
                alike = self._alone.agree(word, exchange, swapped=swapped)
        except DeadlineExceededError as error:
            self._uncount(error, sequence)
            raise
        wait_policy.limit = None
        if not alike:
            raise self._describe(signature)

    def check_at(self, signature: Signature, word: int, sequence: int) -> None:
        """Like `check`, on one node, for a caller that has counted the call and stored its word."""
        call = self._wait_policy.call
        call.what, call.sequence = signature, sequence
        assert self.node_barrier is not None
        try:
            alike = self.node_barrier.wait_for_all(word, sequence)
        except DeadlineExceededError as error:
            self._uncount(error, sequence)
            raise
        if not alike:
            raise self._describe(signature)

    def _uncount(self, error: DeadlineExceededError, sequence: int) -> None:
        """A withdrawn call is not counted."""
        if error.withdrawn:
            self.sequence = sequence - 1
            if self.intents is not None:
                self.intents.note_queued(sequence)

    def end(self) -> None:
        """Publish to the node's ranks that this one makes no further call."""
        if self.node_barrier is not None:
            self.node_barrier.end()

    def _check(self, word: int, sequence: int, exchange: Exchange | None, swapped: bool) -> bool:
        assert self.node_barrier is not None
        self.node_barrier.arrive(word, sequence)
        verdicts = self.verdicts
        if verdicts is None:
            return self.node_barrier.wait_for_all(word, sequence)
        if self.nodes_check is None:
            in_transit = self._wait_policy.call.moves_data(exchange)
            return verdicts.wait_for_verdict(word, sequence, in_transit=in_transit) == ALIKE
        try:
            # Once the node's message is sent, it stays committed, unless a vote withdraws it.
            if alike := swapped or verdicts.collect(word, sequence):
                alike = self.nodes_check.agree(word, exchange, swapped=swapped)
            else:
                alike = self.nodes_check.disagree(word & SEQUENCE_MASK)
        except DeadlineExceededError as error:
            if error.withdrawn:
                verdicts.release()
            raise
        verdicts.publish_verdict(ALIKE if alike else DIFFERENT, sequence)
        return alike

    def _absent(self, nodes: list[int]) -> dict[int, str]:
        """The ranks of the nodes that are waited for, which the node's other ranks read too."""
        if self.verdicts is not None:
            self.verdicts.publish_missing(nodes)
        return ranks_of(self.members, nodes)

    def close(self) -> None:
        """Close the channel to the other nodes."""
        if self.nodes_check is not None:
            self.nodes_check.close()
        if self._leaders is not None and self.node_barrier is not None:
            self._leaders.close()


def _slots(node_barrier: NodeBarrier | None) -> list[list[NDArray[np.uint8]]]:
    if node_barrier is not None:
        return node_barrier.memory.slots
    return [[np.zeros(ROW_BYTES + SMALL_BYTES, np.uint8) for _ in range(2)]]


def ranks_of(members: list[list[int]], chosen: list[int]) -> dict[int, str]:
    """The ranks of the chosen nodes, each with a note for messages."""
    return {
        rank: "" if len(members[node]) == 1 else f" of node {node}"
        for node in chosen
        for rank in members[node]
    }
