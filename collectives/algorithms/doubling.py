"""Recursive doubling: the data of a rank double in every round. Fewest rounds, for any size.

All-reduce: ⌊log₂ p⌋ exchanges of the whole buffer between the largest power of two of ranks. The
remaining ranks send their buffers before and receive the result after (Thakur, Rabenseifner and
Gropp 2005, doi:10.1177/1094342005051521). All-gather: ⌈log₂ p⌉ messages and (p−1)/p of the result
per rank, for any p (Bruck et al. 1997, doi:10.1109/71.642949; cyclic runs of chunks replace the
final rotation). Scan: ⌈log₂ p⌉ messages of the whole buffer, for any p (Hillis and Steele 1986,
doi:10.1145/7902.7903); an exscan shifts the input by one rank first.
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.schedule import Ranks, Recv, Reduce, Round, Send, largest_power_of_two


def all_reduce(rank: Ranks, size: int) -> Iterator[Round]:
    """Exchange the whole buffer with the rank at distance 1, 2, 4 and so on."""
    power = largest_power_of_two(size)
    inside, helped, outside = rank < power, rank < size - power, rank >= power
    if power < size:
        yield [Send(0, rank - power, when=outside), Reduce(0, rank + power, when=helped)]
    distance = 1
    while distance < power:
        peer = rank ^ distance
        yield [Send(0, peer, when=inside), Reduce(0, peer, when=inside)]
        distance *= 2
    if power < size:
        yield [Send(0, rank + power, when=helped), Recv(0, rank - power, when=outside)]


def all_gather(rank: Ranks, size: int) -> Iterator[Round]:
    """After each round a rank holds twice as many chunks, counted backwards from its own."""
    held = 1
    while held < size:
        count = min(held, size - held)
        yield [
            Send((rank - count + 1) % size, (rank + held) % size, count),
            Recv((rank - held - count + 1) % size, (rank - held) % size, count),
        ]
        held += count


def scan(rank: Ranks, size: int) -> Iterator[Round]:
    """After each round a rank has folded the inputs of twice as many ranks, up to itself."""
    yield from _prefixes(rank, size, 0, 0)


def exscan(rank: Ranks, size: int) -> Iterator[Round]:
    """Chunk 1 receives the input of the rank before; then a scan of all ranks but the first."""
    if size > 1:
        yield [Send(0, rank + 1, when=rank + 1 < size), Recv(1, rank - 1, when=rank > 0)]
    yield from _prefixes(rank, size, 1, 1)


def _prefixes(rank: Ranks, size: int, first: int, chunk: int) -> Iterator[Round]:
    """The folds of the chunks of the ranks from `first` up to this one."""
    distance = 1
    while first + distance < size:
        yield [
            Send(chunk, rank + distance, when=(rank >= first) & (rank + distance < size)),
            Reduce(chunk, rank - distance, when=rank - distance >= first),
        ]
        distance *= 2
