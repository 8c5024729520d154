"""Messages of a round between all ranks: every send paired with its matching receive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

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

    def __len__(self) -> int:
        return len(self.rank)


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


def _check_range(ends: Ends, size: int, chunks: int, number: int) -> None:
    peer_wrong = (ends.peer < 0) | (ends.peer >= size) | (ends.peer == ends.rank)
    chunk_wrong = (ends.chunk < 0) | (ends.chunk >= chunks) | (ends.count > chunks)
    for wrong, values, what in (
        (peer_wrong, ends.peer, "no such peer"),
        (chunk_wrong, ends.chunk, "no such chunk, or more chunks than there are"),
    ):
        if wrong.any():
            at = int(wrong.argmax())
            raise ScheduleError(
                f"{what}: {values[at]}",
                round=number,
                rank=int(ends.rank[at]),
                chunk=int(ends.chunk[at]),
            )


def _check_matched(sent: Ends, received: Ends, size: int, number: int) -> None:
    """Raise ScheduleError for a message with one end only; both are sorted by sender, receiver."""
    sent_keys = sent.rank * size + sent.peer
    received_keys = received.peer * size + received.rank
    if np.array_equal(sent_keys, received_keys):
        return
    unmatched, at = np.setdiff1d(sent_keys, received_keys), 0
    if len(unmatched):
        at = int((sent_keys == unmatched[0]).argmax())
        raise ScheduleError(
            f"a send to rank {sent.peer[at]} that it never receives",
            round=number,
            rank=int(sent.rank[at]),
            chunk=int(sent.chunk[at]),
        )
    keys, counts = np.unique(received_keys, return_counts=True)
    expected = [np.count_nonzero(sent_keys == key) for key in keys]
    at = int((received_keys == keys[int((counts != expected).argmax())]).argmax())
    raise ScheduleError(
        f"as many sends as receives are needed between it and rank {received.peer[at]}",
        round=number,
        rank=int(received.rank[at]),
        chunk=int(received.chunk[at]),
    )


def _check_counts(sent: Ends, received: Ends, number: int) -> None:
    unequal = sent.count != received.count
    if unequal.any():
        at = int(unequal.argmax())
        raise ScheduleError(
            f"{received.count[at]} chunks expected, {sent.count[at]} sent by rank {sent.rank[at]}",
            round=number,
            rank=int(received.rank[at]),
            chunk=int(received.chunk[at]),
        )


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
