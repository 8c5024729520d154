"""Programs: what each rank sends and receives in each round, for all ranks or for one node's.

Ranks that do the same need not all be simulated. If a schedule is the same from the point of view
of every node, it suffices to simulate one node, which receives from itself what the others would
send to it: the rotation of all ranks by whole nodes (ring, circulant, pairwise), or their exclusive
or with a multiple of the node's size (halving, doubling), maps every message to a message. `fold`
tests both: it compares every rank with its representative, and beyond `_ALL_TESTED` ranks those of
a random sample.

Equal rounds are stored once, because a ring of p ranks has 2 (p − 1) of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives import algorithms
from collectives.schedules.schedule import Ranks, Reduce, Round, Schedule, Send, Step
from collectives.schedules.spec import spec_of

_ALL_TESTED = 2048
_SAMPLE = 64
_MOST_TURNS = 1 << 21

Indices = NDArray[np.int64]


class TooLargeError(Exception):
    """A schedule without symmetry, of too many messages to simulate."""


class Transfer(NamedTuple):
    """A message from the sender's point of view; `place` is its place among the receiver's."""

    inside: bool
    chunks: int
    receiver: int
    place: int


class Arrival(NamedTuple):
    """A message from the receiver's point of view."""

    inside: bool
    chunks: int
    folds: bool


class Turn(NamedTuple):
    """What a rank does in a round."""

    sends: tuple[Transfer, ...]
    receives: tuple[Arrival, ...]


@dataclass(frozen=True)
class Program:
    """The turns of the simulated ranks, by kind of round, and how often each kind follows."""

    simulated: int
    chunks: int
    """Of one buffer."""
    kinds: tuple[tuple[Turn, ...], ...]
    runs: tuple[tuple[int, int], ...]
    """(kind, number of rounds)."""

    @property
    def ends(self) -> list[int]:
        """The number of rounds up to the end of each run."""
        return list(accumulate(length for _, length in self.runs))


class _Symmetry(NamedTuple):
    """A symmetry by a shift takes a rank to `carry(rank, shift, size)`; `undo` takes it back."""

    carry: Callable[[Ranks, Ranks, int], Ranks]
    undo: Callable[[Ranks, Ranks, int], Ranks]


_ROTATION = _Symmetry(lambda r, by, size: (r + by) % size, lambda r, by, size: (r - by) % size)
_EXCLUSIVE_OR = _Symmetry(lambda r, by, size: r ^ by, lambda r, by, size: r ^ by)


def lifted(schedule: Schedule, ranks_per_node: int) -> Schedule:
    """The schedule between the nodes, at once for every group of ranks of equal local rank."""

    def moved(rank: Ranks, size: int) -> Iterator[Round]:
        local = rank % ranks_per_node
        for steps in schedule(rank // ranks_per_node, size // ranks_per_node):
            yield [replace(step, peer=step.peer * ranks_per_node + local) for step in steps]

    return moved


@lru_cache(maxsize=256)
def program_of(
    collective: str, name: str, size: int, ranks_per_node: int, *, across: bool = False
) -> Program:
    """The program of an algorithm, of one node's ranks where that is exact.

    `across`: between the nodes alone, of one slice for each local rank. Raises TooLargeError.
    """
    found = algorithms.find(collective, name)
    schedule = lifted(found.schedule, ranks_per_node) if across else found.schedule
    chunks = found.chunks(size // ranks_per_node if across else size) // spec_of(collective).buffers
    folded = fold(schedule, size, ranks_per_node, chunks)
    return expand(schedule, size, ranks_per_node, chunks) if folded is None else folded


def expand(schedule: Schedule, size: int, ranks_per_node: int, chunks: int) -> Program:
    """The program of all ranks."""
    found = _collect(schedule, size, size, ranks_per_node, chunks, _ROTATION)
    assert found is not None
    return found


def fold(schedule: Schedule, size: int, ranks_per_node: int, chunks: int) -> Program | None:
    """The program of the first node, which stands for all; None if the nodes differ."""
    unit = min(size, ranks_per_node)
    if unit == size or size % unit:
        return None
    symmetries = [_ROTATION]
    if size & (size - 1) == 0:
        symmetries.append(_EXCLUSIVE_OR)
    for symmetry in symmetries:
        found = _collect(schedule, size, unit, ranks_per_node, chunks, symmetry)
        if found is not None:
            return found
    return None


def _collect(
    schedule: Schedule, size: int, unit: int, ranks_per_node: int, chunks: int, symmetry: _Symmetry
) -> Program | None:
    """The program of the first `unit` ranks, unless another rank does something else."""
    ranks = np.concatenate([np.arange(unit), _others(size, unit)])
    kinds: dict[bytes, int] = {}
    turns: list[tuple[Turn, ...]] = []
    sequence: list[int] = []
    for steps in schedule(ranks, size):
        columns = [_Column.of(step, ranks) for step in steps]
        if not all(column.is_symmetric(ranks, size, unit, symmetry) for column in columns):
            return None
        key = b"".join(column.key(unit) for column in columns)
        if key not in kinds:
            kinds[key] = len(turns)
            turns.append(_turns(columns, size, unit, ranks_per_node, symmetry))
        sequence.append(kinds[key])
        # Equal rounds of one node's ranks are skipped, those of all ranks may not repeat.
        different = len(sequence) if unit == size else len(turns)
        if different * unit > _MOST_TURNS:
            raise TooLargeError(f"{size} ranks with {different} different rounds or more")
    runs = tuple((kind, len(list(same))) for kind, same in groupby(sequence))
    return Program(unit, chunks, tuple(turns), runs)


def _others(size: int, unit: int) -> Indices:
    """The ranks that are compared with their representatives."""
    if size <= max(unit, _ALL_TESTED):
        return np.arange(unit, size)
    generator = np.random.default_rng(size)
    return np.append(generator.integers(unit, size, _SAMPLE), size - 1)


class _Column(NamedTuple):
    """A step of all collected ranks."""

    kind: type[Step]
    peer: Indices
    chunks: Indices
    takes_part: NDArray[np.bool_]

    @classmethod
    def of(cls, step: Step, ranks: Indices) -> _Column:
        """Broadcast the fields of a step."""
        count = np.broadcast_to(np.asarray(step.count, np.int64), ranks.shape)
        peer = np.broadcast_to(np.asarray(step.peer, np.int64), ranks.shape)
        return cls(type(step), peer, count, np.broadcast_to(step.when, ranks.shape) & (count > 0))

    def of_first(self, unit: int) -> list[int]:
        """Those of the first ranks that take part."""
        found: list[int] = np.flatnonzero(self.takes_part[:unit]).tolist()
        return found

    def is_symmetric(self, ranks: Indices, size: int, unit: int, symmetry: _Symmetry) -> bool:
        """Whether every rank does what its representative does, with the peer that moves along."""
        if len(ranks) == unit:
            return True
        local = ranks % unit
        taking = self.takes_part
        peer = symmetry.carry(self.peer[local], ranks - local, size)
        same = (peer == self.peer) & (self.chunks[local] == self.chunks)
        return bool(np.all((taking == taking[local]) & (same | ~taking)))

    def key(self, unit: int) -> bytes:
        """Equal for equal steps of the first ranks."""
        peer = np.where(self.takes_part[:unit], self.peer[:unit], -1)
        return self.kind.__name__.encode() + peer.tobytes() + self.chunks[:unit].tobytes()


def _turns(
    columns: list[_Column], size: int, unit: int, ranks_per_node: int, symmetry: _Symmetry
) -> tuple[Turn, ...]:
    """The turns of a round; every send is paired with the receive that it is for."""
    seen: list[list[int]] = [[] for _ in range(unit)]
    receives: list[list[Arrival]] = [[] for _ in range(unit)]
    for column in columns:
        for rank in column.of_first(unit) if column.kind is not Send else ():
            peer, count = int(column.peer[rank]), int(column.chunks[rank])
            inside = rank // ranks_per_node == peer // ranks_per_node
            seen[rank].append(peer)
            receives[rank].append(Arrival(inside, count, column.kind is Reduce))
    sends: list[list[Transfer]] = [[] for _ in range(unit)]
    for column in columns:
        for rank in column.of_first(unit) if column.kind is Send else ():
            peer, count = int(column.peer[rank]), int(column.chunks[rank])
            receiver = peer % unit
            # The receiver's representative has the sender moved along with itself as its peer.
            sender = int(symmetry.undo(rank, peer - receiver, size))
            place = seen[receiver].index(sender)
            seen[receiver][place] = -1
            sends[rank].append(Transfer(receives[receiver][place].inside, count, receiver, place))
    return tuple(Turn(tuple(sends[rank]), tuple(receives[rank])) for rank in range(unit))
