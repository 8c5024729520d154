"""Recursive halving, then doubling (Rabenseifner 2004, doi:10.1007/978-3-540-24685-5_1).

At a power of two: 2 log₂ p messages and 2(p−1)/p of the buffer per rank, both optimal for large
buffers. Elsewhere the first 2(p − 2^⌊log₂ p⌋) ranks work in pairs: the odd one hands its whole
buffer to the even one before and gets its result after, as Thakur, Rabenseifner and Gropp describe
(2005, doi:10.1177/1094342005051521); the halving cuts the buffer so that a pair's chunks stay
together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives.schedules.schedule import Ranks, Recv, Reduce, Round, Send, largest_power_of_two


class _Pairing:
    """Which ranks speak for a pair, and the numbers of the speakers, a power of two in all."""

    def __init__(self, rank: Ranks, size: int) -> None:
        self.size, self.speakers = size, largest_power_of_two(size)
        self.pairs = size - self.speakers
        self.silent = (rank < 2 * self.pairs) & (rank % 2 == 1)
        self.speaking = (rank >= 2 * self.pairs) | (rank % 2 == 0)
        self.leading = (rank < 2 * self.pairs) & (rank % 2 == 0)
        self.number = np.maximum(rank // 2, rank - self.pairs)

    def rank_of(self, number: Ranks) -> Ranks:
        """The rank of a speaker, which is also the first chunk that it cares for."""
        return number + np.minimum(number, self.pairs)

    def chunks_of(self, number: Ranks, distance: int) -> tuple[Ranks, Ranks]:
        """The first chunk and the count of those of the `distance` speakers around `number`."""
        first = number // distance * distance
        start = self.rank_of(first)
        return start, self.rank_of(first + distance) - start


def _hand_in(rank: Ranks, pairing: _Pairing) -> Iterator[Round]:
    if pairing.pairs:
        yield [
            Send(0, rank - 1, pairing.size, when=pairing.silent),
            Reduce(0, rank + 1, pairing.size, when=pairing.leading),
        ]


def _halve(pairing: _Pairing) -> Iterator[Round]:
    distance = pairing.speakers // 2
    while distance:
        peer = pairing.number ^ distance
        sent, reduced = (pairing.chunks_of(number, distance) for number in (peer, pairing.number))
        yield [
            Send(sent[0], pairing.rank_of(peer), sent[1], when=pairing.speaking),
            Reduce(reduced[0], pairing.rank_of(peer), reduced[1], when=pairing.speaking),
        ]
        distance //= 2


def _double(pairing: _Pairing) -> Iterator[Round]:
    distance = 1
    while distance < pairing.speakers:
        peer = pairing.number ^ distance
        sent, received = (pairing.chunks_of(number, distance) for number in (pairing.number, peer))
        yield [
            Send(sent[0], pairing.rank_of(peer), sent[1], when=pairing.speaking),
            Recv(received[0], pairing.rank_of(peer), received[1], when=pairing.speaking),
        ]
        distance *= 2


def reduce_scatter(rank: Ranks, size: int) -> Iterator[Round]:
    """Halve: in every round give away the half of the chunks that the peer's side will own."""
    pairing = _Pairing(rank, size)
    yield from _hand_in(rank, pairing)
    yield from _halve(pairing)
    if pairing.pairs:
        yield [
            Send(rank + 1, rank + 1, when=pairing.leading),
            Recv(rank, rank - 1, when=pairing.silent),
        ]


def all_reduce(rank: Ranks, size: int) -> Iterator[Round]:
    """Halve, then double back along the same peers."""
    pairing = _Pairing(rank, size)
    yield from _hand_in(rank, pairing)
    yield from _halve(pairing)
    yield from _double(pairing)
    if pairing.pairs:
        yield [
            Send(0, rank + 1, size, when=pairing.leading),
            Recv(0, rank - 1, size, when=pairing.silent),
        ]
