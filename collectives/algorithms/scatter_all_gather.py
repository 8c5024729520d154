"""Broadcast of large buffers: scatter, then all-gather.

The root sends (p−1)/p of the buffer down the binomial tree, and the ring distributes the chunks, so
that no rank sends more than twice the buffer at any size (van de Geijn; Chan et al. 2007,
doi:10.1002/cpe.1206). The root already has every chunk and receives nothing: its buffer may be
read-only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from collectives.algorithms import binomial, ring
from collectives.schedules.schedule import Ranks, Round


def broadcast(rank: Ranks, size: int) -> Iterator[Round]:
    """Scatter along the binomial tree, all-gather along the ring."""
    yield from binomial.scatter(rank, size)
    for send, receive in ring.all_gather(rank, size):
        yield [replace(send, when=send.peer != 0), replace(receive, when=rank != 0)]
