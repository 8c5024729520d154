"""Specifications of the collectives: what every (rank, chunk) holds before and after.

A chunk of a rank's buffer holds contributions of ranks to one block of data. `before` says whether
the rank's own contribution is present at the start. `after` says whose contribution must be present
at the end: that of one rank, that of `EVERY` rank (folded), or `ANYTHING`.

Rooted collectives are specified for root 0 (`schedule.rooted_at` rotates them).

The definitions follow MPI 4.1, chapter 6. All-gather, gather and scatter are specified in place,
with the own block already in its chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from collectives.schedules.schedule import Ranks, chunk_per_rank

EVERY = -1
ANYTHING = -2

Condition: TypeAlias = Callable[[Ranks, Ranks, int], Ranks]


def _own_chunk(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    """Whether the chunk's number is the rank's."""
    return chunk == rank


def _everywhere(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    return (rank >= 0) & (chunk >= 0)


def _on_root(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    return (rank == 0) & (chunk >= 0)


def _where(condition: Condition, origin: Condition) -> Condition:
    """`origin` where the condition holds, `ANYTHING` elsewhere."""

    def after(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
        return np.where(condition(rank, chunk, size), origin(rank, chunk, size), ANYTHING)

    return after


def _every_rank(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    return EVERY


def _root(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    return 0


def _chunk_owner(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    return chunk


def _same_block(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    """Chunk i is block i on every rank."""
    return chunk + 0 * rank


def _outgoing_or_own(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    return (chunk < size) | (chunk == size + rank)


def _incoming(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    return (chunk >= size) & (rank >= 0)


def _sender(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    return chunk - size


def _sender_and_receiver(rank: Ranks, chunk: Ranks, size: int) -> Ranks:
    """Chunk i goes to rank i; chunk size + i comes from rank i."""
    return np.where(chunk < size, rank * size + chunk, (chunk - size) * size + rank)


@dataclass(frozen=True)
class Spec:
    """Pre- and postcondition of a collective.

    `block` gives the block of data that a chunk belongs to. All ranks use the same length for a
    block, so a message must join chunks of the same block. `chunks` is None where the algorithm
    decides the number of chunks.
    """

    name: str
    before: Condition
    after: Condition
    block: Condition = _same_block
    chunks: Callable[[int], int] | None = None
    reduces: bool = False
    rooted: bool = False


SPECS = {
    spec.name: spec
    for spec in (
        Spec("all_reduce", _everywhere, _where(_everywhere, _every_rank), reduces=True),
        Spec("reduce", _everywhere, _where(_on_root, _every_rank), reduces=True, rooted=True),
        Spec("broadcast", _on_root, _where(_everywhere, _root), rooted=True),
        Spec("all_gather", _own_chunk, _where(_everywhere, _chunk_owner), chunks=chunk_per_rank),
        Spec(
            "reduce_scatter",
            _everywhere,
            _where(_own_chunk, _every_rank),
            chunks=chunk_per_rank,
            reduces=True,
        ),
        Spec(
            "gather", _own_chunk, _where(_on_root, _chunk_owner), chunks=chunk_per_rank, rooted=True
        ),
        Spec("scatter", _on_root, _where(_own_chunk, _root), chunks=chunk_per_rank, rooted=True),
        Spec(
            "all_to_all",
            _outgoing_or_own,
            _where(_incoming, _sender),
            block=_sender_and_receiver,
            chunks=lambda size: 2 * size,
        ),
    )
}


def spec_of(collective: str) -> Spec:
    """The specification of a collective; ValueError for an unknown name."""
    if collective not in SPECS:
        raise ValueError(f"collective={collective!r}: must be one of {', '.join(SPECS)}")
    return SPECS[collective]
