"""Specifications of the collectives: what every (rank, chunk) holds before and after.

A chunk of a rank's buffer holds contributions of ranks to one block of data. `before` says whether
the rank's own contribution is present at the start. `after` says whose contribution must be present
at the end: that of one rank, that of `EVERY` rank (folded), those of the ranks `UP_TO` this one or
`BELOW` it (folded), or `ANYTHING`.

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
UP_TO = -3
BELOW = -4

Condition: TypeAlias = Callable[[Ranks, Ranks, int], Ranks]
"""A function of rank, chunk and size; its result may be broadcast over ranks and chunks."""


@dataclass(frozen=True)
class Spec:
    """Pre- and postcondition of a collective.

    `block` gives the block of data that a chunk belongs to. All ranks use the same length for a
    block, so a message must join chunks of the same block. `chunks` is None where the algorithm
    decides the number of chunks. They divide `buffers` buffers of equal length.
    """

    name: str
    before: Condition
    after: Condition
    block: Condition = lambda rank, chunk, size: chunk
    chunks: Callable[[int], int] | None = None
    buffers: int = 1
    reduces: bool = False
    rooted: bool = False


SPECS = {
    spec.name: spec
    for spec in (
        Spec(
            "all_reduce",
            before=lambda rank, chunk, size: True,
            after=lambda rank, chunk, size: EVERY,
            reduces=True,
        ),
        Spec(
            "reduce",
            before=lambda rank, chunk, size: True,
            after=lambda rank, chunk, size: np.where(rank == 0, EVERY, ANYTHING),
            reduces=True,
            rooted=True,
        ),
        Spec(
            "scan",
            before=lambda rank, chunk, size: True,
            after=lambda rank, chunk, size: UP_TO,
            chunks=lambda size: 1,
            reduces=True,
        ),
        # Chunk 0 is the input, chunk 1 the result.
        Spec(
            "exscan",
            before=lambda rank, chunk, size: chunk == 0,
            after=lambda rank, chunk, size: np.where((chunk == 1) & (rank > 0), BELOW, ANYTHING),
            block=lambda rank, chunk, size: 0 * (rank + chunk),
            chunks=lambda size: 2,
            buffers=2,
            reduces=True,
        ),
        Spec(
            "broadcast",
            before=lambda rank, chunk, size: rank == 0,
            after=lambda rank, chunk, size: 0,
            rooted=True,
        ),
        Spec(
            "all_gather",
            before=lambda rank, chunk, size: chunk == rank,
            after=lambda rank, chunk, size: chunk,
            chunks=chunk_per_rank,
        ),
        Spec(
            "reduce_scatter",
            before=lambda rank, chunk, size: True,
            after=lambda rank, chunk, size: np.where(chunk == rank, EVERY, ANYTHING),
            chunks=chunk_per_rank,
            reduces=True,
        ),
        Spec(
            "gather",
            before=lambda rank, chunk, size: chunk == rank,
            after=lambda rank, chunk, size: np.where(rank == 0, chunk, ANYTHING),
            chunks=chunk_per_rank,
            rooted=True,
        ),
        Spec(
            "scatter",
            before=lambda rank, chunk, size: rank == 0,
            after=lambda rank, chunk, size: np.where(chunk == rank, 0, ANYTHING),
            chunks=chunk_per_rank,
            rooted=True,
        ),
        # Chunk i goes to rank i; chunk size + i is received from rank i.
        Spec(
            "all_to_all",
            before=lambda rank, chunk, size: (chunk < size) | (chunk == size + rank),
            after=lambda rank, chunk, size: np.where(chunk < size, ANYTHING, chunk - size),
            block=lambda rank, chunk, size: np.where(
                chunk < size, rank * size + chunk, (chunk - size) * size + rank
            ),
            chunks=lambda size: 2 * size,
            buffers=2,
        ),
    )
}


def spec_of(collective: str) -> Spec:
    """The specification of a collective; ValueError for an unknown name."""
    if collective not in SPECS:
        raise ValueError(f"collective={collective!r}: must be one of {', '.join(SPECS)}")
    return SPECS[collective]
