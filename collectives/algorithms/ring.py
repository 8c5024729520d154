"""Ring: each rank exchanges messages with its two neighbours only.

Bandwidth-optimal at any size: all-reduce sends 2(p−1)/p of the buffer in 2(p−1) messages per rank,
reduce-scatter and all-gather half of each (Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002).
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.schedule import Ranks, Recv, Reduce, Round, Send


def reduce_scatter(rank: Ranks, size: int) -> Iterator[Round]:
    """Each chunk starts at its owner's successor, goes round once, and collects every part."""
    following, previous = (rank + 1) % size, (rank - 1) % size
    for step in range(1, size):
        yield [
            Send((rank - step) % size, following),
            Reduce((rank - step - 1) % size, previous),
        ]


def all_gather(rank: Ranks, size: int) -> Iterator[Round]:
    """Every rank forwards the chunk that it received in the round before."""
    following, previous = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        yield [Send((rank - step) % size, following), Recv((rank - step - 1) % size, previous)]


def all_reduce(rank: Ranks, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather."""
    yield from reduce_scatter(rank, size)
    yield from all_gather(rank, size)
