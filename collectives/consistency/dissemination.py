"""Words of N nodes compared in ⌈log₂ N⌉ rounds of messages that may carry data.

Dissemination (Hensgen, Finkel and Manber 1988): in round k the leader of each node sends its word
to the leader 2^k nodes further, and receives that of the leader 2^k nodes before. A leader that
receives another word than its own sends DIFFERENT from then on, so that after the last round every
leader knows whether any two differ. A message also carries the data of the nodes that it stands
for: after the last round every leader holds those of all (the all-gather of Bruck et al. 1997).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

from collectives.consistency.signature import FINGERPRINT_BITS
from collectives.shm.layout import STAGE_BYTES
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK
from collectives.transports.base import Transport
from collectives.transports.neighbors import Buffer, NeighborChannel
from collectives.waiting.wait_policy import WaitPolicy

Block = tuple[Buffer, int]
"""A buffer of messages, and the byte, a multiple of 8, where a node's data begin in it."""

LARGEST_EXCHANGE = 128 << 10
"""The most bytes of all nodes together that may travel with the check, equally many of each."""
LARGEST_OF_TWO = STAGE_BYTES
"""The most bytes of one of two nodes, where each needs all of the other's in any case."""
DIFFERENT = (1 << FINGERPRINT_BITS) - 1
"""In place of the fingerprint: of a node whose ranks disagree, or that has found a difference."""

# A word, and the shortest deadline in nanoseconds.
_HEAD_BYTES = 16
_NO_DEADLINE = (1 << 64) - 1
_LONG = 1e9
# In front of each block.
_LENGTH_BYTES = 8
LENGTH_AT = _HEAD_BYTES >> 3
FIRST_BLOCK = _HEAD_BYTES + _LENGTH_BYTES
"""The word of the first block's length, and the byte where its data begin."""


def padded(nbytes: int) -> int:
    """The room of so many bytes: what follows begins at a multiple of 8."""
    return nbytes + 7 & ~7


class Exchange(Protocol):
    """Data that travel with the check of a call; their receivers need not know how many."""

    source: Any
    target: Any
    """This rank's data and the memory for the result, set before every call."""

    def store(self, parity: int) -> None:
        """Store this rank's data where its node's leader reads them."""

    def pack(self, block: Block) -> int:
        """As the leader: store the data of the node's ranks; how many bytes. May be called again.

        A node may have `LARGEST_EXCHANGE // nodes` bytes, one of two `LARGEST_OF_TWO`.
        """

    def unpack(self, blocks: Sequence[Block]) -> None:
        """As the leader: use the data of all nodes, in the order of the nodes."""


class Rounds:
    """The state of one call's rounds."""

    __slots__ = (
        "_only", "alike", "blocks", "deadline", "exchange", "nanoseconds", "number", "round",
        "sent", "status", "word",
    )  # fmt: skip

    def __init__(
        self, word: int, exchange: Exchange | None, deadline: float, *, only: bool = False
    ) -> None:
        """`only`: take no other word of this number, which would be of rounds that were ended."""
        self.word, self.status, self.exchange, self._only = word, word, exchange, only
        self.number = word & SEQUENCE_MASK
        self.deadline = deadline
        """The shortest of the nodes whose messages have arrived and of this one, in seconds."""
        self.nanoseconds = _NO_DEADLINE
        """The same, as it was sent last."""
        self.alike = word >> SEQUENCE_BITS != DIFFERENT
        """Whether all words so far, this node's included, are those of the same call."""
        self.round, self.sent = 0, False
        self.blocks: list[Block] = []
        """Of this node, and of the nodes before it, backwards."""

    def differ(self) -> None:
        """Note that the words differ."""
        self.alike, self.status = False, DIFFERENT << SEQUENCE_BITS | self.number

    def accepts(self, word: int) -> bool:
        """Whether a message belongs to these rounds."""
        return word == self.word if self._only else word & SEQUENCE_MASK == self.number

    def is_outdated(self, word: int) -> bool:
        """Whether a message belongs to earlier rounds, which were ended.

        Those of the next call may have begun, where a vote has completed this one.
        """
        following = self.number + 1 & SEQUENCE_MASK
        return word & SEQUENCE_MASK != following and not self.accepts(word)


class Dissemination:
    """One leader's channels, over which calls run one after the other."""

    def __init__(
        self,
        leaders: Transport,
        wait_policy: WaitPolicy,
        absent: Callable[[list[int]], dict[int, str]],
    ) -> None:
        """`absent` returns the ranks of the nodes that are waited for."""
        self._wait_policy, self._absent = wait_policy, absent
        rank, size = leaders.rank, leaders.size
        # The blocks of all nodes, in the order of the nodes.
        self._in_order = itemgetter(*((rank - node) % size for node in range(size)))
        distances = [1 << k for k in range((size - 1).bit_length())]
        self._counts = [min(distance, size - distance) for distance in distances]
        most = _LENGTH_BYTES + padded(LARGEST_OF_TWO if size == 2 else LARGEST_EXCHANGE // size)
        nbytes = _HEAD_BYTES + max(self._counts) * most
        self._deadline, self.nanoseconds = math.inf, _NO_DEADLINE
        """The last deadline that was sent, in seconds and in nanoseconds."""
        self.outgoing: Buffer
        """From which the message of the last swap was sent."""
        self.count = len(distances)
        """The number of rounds."""
        self._targets = [(rank + distance) % size for distance in distances]
        self._sources = [(rank - distance) % size for distance in distances]
        self.channels = [
            leaders.open_neighbor_channel(target, source, nbytes)
            for target, source in zip(self._targets, self._sources, strict=True)
        ]

    def advance(self, rounds: Rounds, spins: int = 1) -> bool:
        """Send and receive what can be; whether all rounds are complete.

        Looks for each message `spins` times, and does not wait otherwise.
        """
        while rounds.round < self.count:
            channel = self.channels[rounds.round]
            if not rounds.sent:
                self._send(rounds, channel)
            arrived = channel.arrived
            for _ in range(spins):
                if arrived():
                    break
            else:
                return False
            word = channel.incoming.words[0]
            if word == rounds.status or rounds.accepts(word):
                self._receive(rounds, channel.incoming, word)
            elif rounds.is_outdated(word):
                channel.discard()
            else:
                return False
        return True

    def swap(self, word: int, exchange: Exchange | None) -> bool:
        """The only round between two nodes, as `advance`, in half of the time.

        Whether the other node's message is here, with the same word, as in most calls. `after_swap`
        returns the rounds otherwise.
        """
        channel, length = self.channels[0], _HEAD_BYTES
        self.outgoing = outgoing = channel.outgoing()
        words = outgoing.words
        words[0], words[1] = word, self.nanoseconds
        if exchange is not None:
            words[LENGTH_AT] = nbytes = exchange.pack((outgoing, FIRST_BLOCK))
            length = FIRST_BLOCK + padded(nbytes)
        channel.send(length)
        arrived = channel.arrived
        wait_policy = self._wait_policy
        for _ in range(wait_policy.spins or 1):
            if arrived():
                # The deadline of a node that sends this is no shorter than in the last call.
                return channel.incoming.words[0] == word
        for _ in range(wait_policy.yields):
            os.sched_yield()
            if arrived():
                return channel.incoming.words[0] == word
        return False

    def after_swap(self, word: int, exchange: Exchange | None) -> Rounds:
        """The rounds of a call whose message was sent from `outgoing`."""
        rounds = Rounds(word, exchange, self._deadline)
        rounds.sent, rounds.nanoseconds = True, self.nanoseconds
        if exchange is not None:
            rounds.blocks.append((self.outgoing, FIRST_BLOCK))
        return rounds

    def take(self, exchange: Exchange) -> None:
        """Pass on the data of a message that has arrived during the swap."""
        blocks = (self.outgoing, FIRST_BLOCK), (self.channels[0].incoming, FIRST_BLOCK)
        exchange.unpack(self._in_order(blocks))

    def end_swap(self) -> bool:
        """Discard the message that has arrived; whether the other one is sent."""
        self.channels[0].discard()
        return self.channels[0].sent()

    def absent(self, rounds: Rounds) -> dict[int, str]:
        """The ranks of the node whose message is missing."""
        return self._absent([self._sources[rounds.round]])

    def _send(self, rounds: Rounds, channel: NeighborChannel) -> None:
        length, outgoing = _HEAD_BYTES, channel.outgoing()
        words = outgoing.words
        words[0] = rounds.status
        words[1] = rounds.nanoseconds = self._nanoseconds_of(rounds.deadline)
        if rounds.exchange is not None:
            if not rounds.blocks:
                own = outgoing, FIRST_BLOCK
                rounds.blocks.append(own)
                words[LENGTH_AT] = nbytes = rounds.exchange.pack(own)
                length = FIRST_BLOCK + padded(nbytes)
            elif rounds.alike:
                for buffer, start in rounds.blocks[: self._counts[rounds.round]]:
                    first = start - _LENGTH_BYTES
                    content = buffer.content[first : start + padded(buffer.words[first >> 3])]
                    outgoing.content[length : length + len(content)] = content
                    length += len(content)
        channel.send(length)
        rounds.sent = True

    def _nanoseconds_of(self, deadline: float) -> int:
        if deadline != self._deadline:
            self._deadline = deadline
            self.nanoseconds = _NO_DEADLINE if deadline >= _LONG else int(deadline * 1e9)
        return self.nanoseconds

    def _receive(self, rounds: Rounds, incoming: Buffer, word: int) -> None:
        words = incoming.words
        if words[1] < rounds.nanoseconds:
            rounds.deadline = words[1] / 1e9
        if word != rounds.status:
            rounds.differ()
        elif rounds.exchange is not None:
            start = FIRST_BLOCK
            rounds.blocks.append((incoming, start))
            for _ in range(1, self._counts[rounds.round]):
                start += padded(words[start - _LENGTH_BYTES >> 3]) + _LENGTH_BYTES
                rounds.blocks.append((incoming, start))
        rounds.round, rounds.sent = rounds.round + 1, False

    def finish(self, rounds: Rounds, answer: Callable[[int], object]) -> None:
        """Pass on the data and wait until all messages are sent.

        Meanwhile `answer` is called with the number. The messages are sent only while this rank
        makes progress (MPI 4.1, section 3.5). Those of different words may be received in the next
        call only.
        """
        if rounds.exchange is not None and rounds.alike:
            rounds.exchange.unpack(self._in_order(rounds.blocks))
        for channel in self.channels[: rounds.round]:
            channel.discard()
        if rounds.alike:
            for channel in self.channels:
                if not channel.sent():
                    self.wait_until_sent(channel, rounds.number, answer)

    def wait_until_sent(
        self, channel: NeighborChannel, number: int, answer: Callable[[int], object]
    ) -> None:
        """Wait for a message of the call of that number; `answer` is called with it meanwhile."""

        def sent() -> bool:
            answer(number)
            return channel.sent()

        absent = partial(self._absent, self._targets)
        self._wait_policy.spin_until(sent, absent, in_transit=True)

    def close(self) -> None:
        """Close the channels."""
        for channel in self.channels:
            channel.close()
