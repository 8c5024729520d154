"""Binomial tree rooted at rank 0: ⌈log₂ p⌉ rounds for the rooted collectives.

The parent of rank r is r without its lowest set bit. Its subtree is the ranks from r on, as many as
the value of that bit (Chan et al. 2007, doi:10.1002/cpe.1206).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives.schedules.schedule import Ranks, Recv, Reduce, Round, Send


def _distances(size: int) -> list[int]:
    """1, 2, 4, … below size."""
    return [1 << bit for bit in range((size - 1).bit_length())]


def _is_child(rank: Ranks, distance: int) -> Ranks:
    return rank % (2 * distance) == distance


def _is_parent(rank: Ranks, distance: int, size: int) -> Ranks:
    return (rank % (2 * distance) == 0) & (rank + distance < size)


def broadcast(rank: Ranks, size: int) -> Iterator[Round]:
    """Send from the farthest child to the nearest."""
    for distance in reversed(_distances(size)):
        yield [
            Send(0, rank + distance, when=_is_parent(rank, distance, size)),
            Recv(0, rank - distance, when=_is_child(rank, distance)),
        ]


def reduce(rank: Ranks, size: int) -> Iterator[Round]:
    """The reverse of the broadcast: every rank folds its children's buffers into its own."""
    for distance in _distances(size):
        yield [
            Send(0, rank - distance, when=_is_child(rank, distance)),
            Reduce(0, rank + distance, when=_is_parent(rank, distance, size)),
        ]


def scatter(rank: Ranks, size: int) -> Iterator[Round]:
    """Send every child the chunks of its whole subtree."""
    for distance in reversed(_distances(size)):
        child = rank + distance
        yield [
            Send(
                child % size,
                child,
                np.minimum(distance, size - child),
                when=_is_parent(rank, distance, size),
            ),
            Recv(
                rank,
                rank - distance,
                np.minimum(distance, size - rank),
                when=_is_child(rank, distance),
            ),
        ]


def gather(rank: Ranks, size: int) -> Iterator[Round]:
    """The reverse of the scatter: every rank sends the chunks of its subtree to its parent."""
    for distance in _distances(size):
        child = rank + distance
        yield [
            Send(
                rank,
                rank - distance,
                np.minimum(distance, size - rank),
                when=_is_child(rank, distance),
            ),
            Recv(
                child % size,
                child,
                np.minimum(distance, size - child),
                when=_is_parent(rank, distance, size),
            ),
        ]
