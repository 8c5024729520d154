"""Reduce of large buffers: reduce-scatter, then gather.

The reverse of `scatter_all_gather`: no rank sends or folds more than twice the buffer (Chan et al.
2007, doi:10.1002/cpe.1206).
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms import binomial, ring
from collectives.schedules.schedule import Ranks, Round


def reduce(rank: Ranks, size: int) -> Iterator[Round]:
    """Reduce-scatter along the ring, gather along the binomial tree."""
    yield from ring.reduce_scatter(rank, size)
    yield from binomial.gather(rank, size)
