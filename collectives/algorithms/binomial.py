"""Binomial tree rooted at rank 0: ⌈log₂ p⌉ rounds for the rooted collectives.

The parent of rank r is r without its lowest set bit. Its subtree is the ranks from r on, as many as
the value of that bit (Chan et al. 2007, doi:10.1002/cpe.1206).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives.schedules.schedule import Ranks, Recv, Reduce, Round, Send, Step


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
        yield [_with_child(Send, rank, distance, size), _with_parent(Recv, rank, distance, size)]


def gather(rank: Ranks, size: int) -> Iterator[Round]:
    """The reverse of the scatter: every rank sends the chunks of its subtree to its parent."""
    for distance in _distances(size):
        yield [_with_parent(Send, rank, distance, size), _with_child(Recv, rank, distance, size)]


def _with_child(step: type[Step], rank: Ranks, distance: int, size: int) -> Step:
    """A message with the chunks of the subtree of the child at that distance."""
    child = rank + distance
    count = np.minimum(distance, size - child)
    return step(child % size, child, count, when=_is_parent(rank, distance, size))


def _with_parent(step: type[Step], rank: Ranks, distance: int, size: int) -> Step:
    """A message with the chunks of this rank's subtree."""
    count = np.minimum(distance, size - rank)
    return step(rank, rank - distance, count, when=_is_child(rank, distance))
