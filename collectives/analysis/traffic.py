"""Messages of a round between all ranks: every send paired with its matching receive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from collectives.errors import ScheduleError
from collectives.schedules.schedule import Reduce, Round, Send, Step

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Ends:
    """One end of many messages: its rank, its peer, and the run of chunks."""

    rank: Indices
    peer: Indices
    chunk: Indices
    count: Indices
    step: Indices

    def __getitem__(self, selection: Any) -> Ends:
        """The selected messages' ends."""
        return Ends(*(getattr(self, field.name)[selection] for field in fields(self)))


@dataclass(frozen=True)
class Messages:
    """The messages of one round; entry i of `sent` matches entry i of `received`."""

    sent: Ends
    received: Ends
    reduces: NDArray[np.bool_]

    def by_step(self) -> Iterator[tuple[bool, Ends, Ends]]:
        """(reduces, sent, received) for each receiving step, overwriting ones first."""
        for reducing in (False, True):
            for step in np.unique(self.received.step[self.reduces == reducing]):
                chosen = self.received.step == step
                yield reducing, self.sent[chosen], self.received[chosen]


def _ends(steps: list[tuple[int, Step]], size: int) -> Ends:
    ranks = np.arange(size)
    columns: list[list[Indices]] = [[], [], [], [], []]
    for position, step in steps:
        taking_part = np.broadcast_to(step.when, size) & (np.broadcast_to(step.count, size) > 0)
        for column, value in zip(
            columns, (ranks, step.peer, step.chunk, step.count, position), strict=True
        ):
            column.append(np.broadcast_to(np.asarray(value, np.int64), size)[taking_part])
    return Ends(
        *(np.concatenate(column) if column else np.empty(0, np.int64) for column in columns)
    )


def _refuse(problem: str, number: int, ends: Ends, wrong: NDArray[np.bool_]) -> NoReturn:
    """Raise ScheduleError for the first wrong message; `problem` may name its fields."""
    at = int(wrong.argmax())
    named = {field.name: getattr(ends, field.name)[at] for field in fields(ends)}
    rank, chunk = int(ends.rank[at]), int(ends.chunk[at])
    raise ScheduleError(problem.format(**named), round=number, rank=rank, chunk=chunk)


def _check_range(ends: Ends, size: int, chunks: int, number: int) -> None:
    peer_wrong = (ends.peer < 0) | (ends.peer >= size) | (ends.peer == ends.rank)
    if peer_wrong.any():
        _refuse("peer {peer} does not exist, or is the rank itself", number, ends, peer_wrong)
    chunk_wrong = (ends.chunk < 0) | (ends.chunk >= chunks) | (ends.count > chunks)
    if chunk_wrong.any():
        problem = "no such chunk, or more chunks than there are: {chunk}"
        _refuse(problem, number, ends, chunk_wrong)


def _check_matched(sent: Ends, received: Ends, size: int, number: int) -> None:
    """Raise ScheduleError for a message with one end only; both are sorted by sender, receiver."""
    sent_keys = sent.rank * size + sent.peer
    received_keys = received.peer * size + received.rank
    if np.array_equal(sent_keys, received_keys):
        return
    unmatched = np.setdiff1d(sent_keys, received_keys)
    if len(unmatched):
        problem = "a send to rank {peer} that it never receives"
        _refuse(problem, number, sent, sent_keys == unmatched[0])
    keys, counts = np.unique(received_keys, return_counts=True)
    expected = [np.count_nonzero(sent_keys == key) for key in keys]
    problem = "as many sends as receives are needed between it and rank {peer}"
    _refuse(problem, number, received, received_keys == keys[(counts != expected).argmax()])


def _check_counts(sent: Ends, received: Ends, number: int) -> None:
    unequal = sent.count != received.count
    if unequal.any():
        problem = f"{{count}} chunks expected, {sent.count[unequal][0]} sent by rank {{peer}}"
        _refuse(problem, number, received, unequal)


def messages(steps: Round, size: int, chunks: int, number: int) -> Messages:
    """Pair the sends and receives of round `number` for all ranks at once.

    Raises ScheduleError for a step without a partner, or for one that names a rank or chunk that
    does not exist.
    """
    numbered = list(enumerate(steps))
    sent = _ends([(at, step) for at, step in numbered if isinstance(step, Send)], size)
    received = _ends([(at, step) for at, step in numbered if not isinstance(step, Send)], size)
    for ends in (sent, received):
        _check_range(ends, size, chunks, number)
    sent = sent[np.argsort(sent.rank * size + sent.peer, kind="stable")]
    received = received[np.argsort(received.peer * size + received.rank, kind="stable")]
    _check_matched(sent, received, size, number)
    _check_counts(sent, received, number)
    folding = np.array([isinstance(step, Reduce) for step in steps], dtype=bool)
    return Messages(sent, received, folding[received.step])
