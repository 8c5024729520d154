"""Recursive halving, then doubling (Rabenseifner 2004, doi:10.1007/978-3-540-24685-5_1).

At a power of two: 2 log₂ p messages and 2(p−1)/p of the buffer per rank, both optimal for large
buffers. Otherwise the first 2(p − 2^⌊log₂ p⌋) ranks form pairs: the odd rank sends its whole buffer
to the even one before and receives its result after (Thakur, Rabenseifner and Gropp 2005,
doi:10.1177/1094342005051521). The halving cuts the buffer so that a pair's chunks stay together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives.schedules.schedule import Ranks, Recv, Reduce, Round, Send, largest_power_of_two


class _Pairing:
    """The active ranks, one of each pair, and their numbers; a power of two in all."""

    def __init__(self, rank: Ranks, size: int) -> None:
        self.size, self.active_count = size, largest_power_of_two(size)
        self.pairs = size - self.active_count
        self.passive = (rank < 2 * self.pairs) & (rank % 2 == 1)
        self.active = (rank >= 2 * self.pairs) | (rank % 2 == 0)
        self.leading = (rank < 2 * self.pairs) & (rank % 2 == 0)
        self.number = np.maximum(rank // 2, rank - self.pairs)

    def rank_of(self, number: Ranks) -> Ranks:
        """The rank of an active number, which is also the first chunk of its pair."""
        return number + np.minimum(number, self.pairs)

    def chunks_of(self, number: Ranks, distance: int) -> tuple[Ranks, Ranks]:
        """First chunk and count of the chunks of the `distance` active ranks around `number`."""
        first = number // distance * distance
        start = self.rank_of(first)
        return start, self.rank_of(first + distance) - start


def _fold_pairs(rank: Ranks, pairing: _Pairing) -> Iterator[Round]:
    if pairing.pairs:
        yield [
            Send(0, rank - 1, pairing.size, when=pairing.passive),
            Reduce(0, rank + 1, pairing.size, when=pairing.leading),
        ]


def _halve(pairing: _Pairing) -> Iterator[Round]:
    distance = pairing.active_count // 2
    while distance:
        peer = pairing.number ^ distance
        sent, reduced = (pairing.chunks_of(number, distance) for number in (peer, pairing.number))
        yield [
            Send(sent[0], pairing.rank_of(peer), sent[1], when=pairing.active),
            Reduce(reduced[0], pairing.rank_of(peer), reduced[1], when=pairing.active),
        ]
        distance //= 2


def _double(pairing: _Pairing) -> Iterator[Round]:
    distance = 1
    while distance < pairing.active_count:
        peer = pairing.number ^ distance
        sent, received = (pairing.chunks_of(number, distance) for number in (pairing.number, peer))
        yield [
            Send(sent[0], pairing.rank_of(peer), sent[1], when=pairing.active),
            Recv(received[0], pairing.rank_of(peer), received[1], when=pairing.active),
        ]
        distance *= 2


def reduce_scatter(rank: Ranks, size: int) -> Iterator[Round]:
    """Halve: in every round send the half of the chunks that the peer's side will own."""
    pairing = _Pairing(rank, size)
    yield from _fold_pairs(rank, pairing)
    yield from _halve(pairing)
    if pairing.pairs:
        yield [
            Send(rank + 1, rank + 1, when=pairing.leading),
            Recv(rank, rank - 1, when=pairing.passive),
        ]


def all_reduce(rank: Ranks, size: int) -> Iterator[Round]:
    """Halve, then double along the same peers."""
    pairing = _Pairing(rank, size)
    yield from _fold_pairs(rank, pairing)
    yield from _halve(pairing)
    yield from _double(pairing)
    if pairing.pairs:
        yield [
            Send(0, rank + 1, size, when=pairing.leading),
            Recv(0, rank - 1, size, when=pairing.passive),
        ]
