"""Halving and doubling on a circulant graph: optimal rounds and bytes for any number of ranks.

Reduce-scatter takes ⌈log₂ p⌉ messages and (p−1)/p of the buffer per rank, all-reduce twice that,
whether or not p is a power of two (Träff 2024, arXiv:2410.14234).
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms import doubling
from collectives.schedules.schedule import Ranks, Reduce, Round, Send


def reduce_scatter(rank: Ranks, size: int) -> Iterator[Round]:
    """Send the farther half of the chunks of the next `held` ranks, until one's own is left."""
    held = size
    while held > 1:
        kept = (held + 1) // 2
        count = held - kept
        yield [
            Send((rank + kept) % size, (rank + kept) % size, count),
            Reduce(rank, (rank - kept) % size, count),
        ]
        held = kept


def all_reduce(rank: Ranks, size: int) -> Iterator[Round]:
    """Reduce-scatter, then the all-gather by doubling."""
    yield from reduce_scatter(rank, size)
    yield from doubling.all_gather(rank, size)
