"""Schedules: what one rank does in a collective, round by round.

Each rank has one buffer, cut into chunks. A round has three phases: post every send and receive,
wait for all of them, fold the received data of the reductions. Hence a `Reduce` may target a chunk
that is sent in the same round, and a `Recv` may not. A round either receives or folds a chunk, not
both. There are no copies, tags or further dependencies.

A step names the peer and a run of `count` consecutive chunks, which travel as one message. The run
is cyclic: it may start near the end of the buffer and continue at its beginning. Messages between
two ranks in one round match in the order of their steps.

Algorithms are pure functions `(rank, size) → rounds` of arithmetic alone. Where a rank does not
take part, the step's `when` is false. Therefore the same function runs for one rank (an int, to
execute it) and for all ranks at once (`numpy.arange(size)`, to verify and to price it).
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
    """One message: `count` consecutive chunks starting at `chunk`, to or from `peer`."""

    chunk: Ranks
    peer: Ranks
    count: Ranks = 1
    when: Ranks = True


class Send(Step):
    """Send the chunks as they are at the start of the round."""


class Recv(Step):
    """Overwrite the chunks with the data that the peer sends."""


class Reduce(Step):
    """Fold the data that the peer sends into the chunks."""


Round: TypeAlias = Sequence[Step]
Schedule: TypeAlias = Callable[[Ranks, int], Iterator[Round]]


def for_rank(schedule: Schedule, rank: int, size: int) -> list[list[Step]]:
    """The rounds of one rank, with plain ints, without the steps in which it takes no part."""
    return [
        [
            type(step)(int(step.chunk), int(step.peer), int(step.count))
            for step in steps
            if step.when and step.count > 0
        ]
        for steps in schedule(rank, size)
    ]


def rooted_at(schedule: Schedule, root: int, chunks: int) -> Schedule:
    """The schedule rotated so that `root` replaces rank 0.

    Rooted algorithms are written for root 0. Ranks and chunks are rotated alike.
    """

    def moved(rank: Ranks, size: int) -> Iterator[Round]:
        for steps in schedule((rank - root) % size, size):
            yield [
                replace(step, chunk=(step.chunk + root) % chunks, peer=(step.peer + root) % size)
                for step in steps
            ]

    return moved


def one_chunk(size: int) -> int:
    """One chunk: the buffer is not cut."""
    return 1


def chunk_per_rank(size: int) -> int:
    """One chunk for each rank."""
    return size


def split_lengths(total: int, parts: int) -> NDArray[np.int64]:
    """Lengths as of `numpy.array_split`: they differ by at most one, longer parts first."""
    base, extra = divmod(total, parts)
    return base + (np.arange(parts) < extra)


def largest_power_of_two(size: int) -> int:
    """The largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)
