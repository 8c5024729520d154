"""A schedule: what one rank does, round by round, in a collective.

Each rank has one buffer, cut into chunks. A round has three phases: post every send and receive,
wait for all of them, fold what came for the reductions. So a `Reduce` may target a chunk that is
being sent in its round, and a `Recv` may not; a chunk is received or folded in a round, not both.
There are no copies, tags or dependencies beyond that.

A step names the peer and a run of `count` consecutive chunks, which travel as one message; the run
is cyclic, so that it may start near the end of the buffer and go on at its beginning. Messages
between two ranks in one round meet in the order of their steps.

Algorithms are pure functions `(rank, size) → rounds` of arithmetic alone. Where a rank takes no
part, the step's `when` is false: written so, the same function runs for one rank (an int: to
execute it) or for all ranks at once (`numpy.arange(size)`: to verify and to price it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# An int for one rank, or an array with one entry per rank. `Any` because the two have no common
# type under which `rank ^ 1` and `rank < 3` mean the same to a type checker.
Ranks: TypeAlias = Any


@dataclass(frozen=True)
class Step:
    """One message: `count` consecutive chunks from `chunk` on, to or from `peer`."""

    chunk: Ranks
    peer: Ranks
    count: Ranks = 1
    when: Ranks = True


class Send(Step):
    """Send the chunks as they are at the beginning of the round."""


class Recv(Step):
    """Overwrite the chunks with what the peer sends."""


class Reduce(Step):
    """Fold what the peer sends into the chunks."""


Round: TypeAlias = Sequence[Step]
Schedule: TypeAlias = Callable[[Ranks, int], Iterator[Round]]


def for_rank(schedule: Schedule, rank: int, size: int) -> list[list[Step]]:
    """The rounds of one rank, with plain ints, without the steps it takes no part in."""
    return [
        [
            type(step)(int(step.chunk), int(step.peer), int(step.count))
            for step in steps
            if step.when and step.count > 0
        ]
        for steps in schedule(rank, size)
    ]


def rooted_at(schedule: Schedule, root: int, chunks: int) -> Schedule:
    """The same schedule with `root` in the place of rank 0, and every rank and chunk moved along.

    Rooted algorithms are written for root 0; all others are moved by rotation.
    """

    def moved(rank: Ranks, size: int) -> Iterator[Round]:
        for steps in schedule((rank - root) % size, size):
            yield [
                replace(step, chunk=(step.chunk + root) % chunks, peer=(step.peer + root) % size)
                for step in steps
            ]

    return moved


def one_chunk(size: int) -> int:
    """The buffer is never cut."""
    return 1


def chunk_per_rank(size: int) -> int:
    """One chunk for each rank."""
    return size


def split_lengths(total: int, parts: int) -> NDArray[np.int64]:
    """The lengths that `numpy.array_split` gives: they differ by at most one, longer ones first."""
    base, extra = divmod(total, parts)
    return base + (np.arange(parts) < extra)


def largest_power_of_two(size: int) -> int:
    """The largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)
