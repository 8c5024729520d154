"""The last calls of all ranks in one file, for the trace viewers of Chrome and Perfetto.

Times are read from each rank's own clock. Processes of one machine have the same clock. The clocks
of other machines are compared with rank 0's by messages: the reading of the shortest round trip is
the closest to the middle between sending and receiving.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.calls import Operation
from collectives.calls.objects import broadcast_pickle, gather_pickles
from collectives.consistency import flight_recorder
from collectives.consistency.flight_recorder import Entry
from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine
from collectives.transports.base import Transport

Clock = Callable[[], int]
"""Nanoseconds since an arbitrary moment."""

_ROUNDS = 10
_THREADS = ("blocking calls", "asynchronous calls")
# Two processes with equal contents of these files have the same clock (Linux).
_CLOCK_FILES = ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets")


class RankCalls(NamedTuple):
    """One rank's contribution to the trace."""

    machine: str
    """Ranks with equal machine names have the same clock."""
    threads: tuple[list[Entry], ...]
    """Entries of the blocking calls, and of the asynchronous calls."""


def trace(path: str | os.PathLike[str], asynchronous: list[Entry]) -> Operation:
    """Write every rank's last calls; an OSError of the writing rank is raised on all ranks."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path={path!r}: must be a str or an os.PathLike")

    def perform(engine: Engine) -> None:
        own = RankCalls(machine(), (engine.recorder.entries(), asynchronous))
        ranks = gather_pickles(engine, pickle.dumps(own))
        names = [each.machine for each in ranks]
        offsets = clock_offsets(engine.transport, names, flight_recorder.clock)

        def write() -> None:
            Path(path).write_text(json.dumps(content(ranks, offsets)), encoding="utf-8")

        broadcast_pickle(engine, write)

    return Operation(Signature("trace"), perform)


def machine() -> str:
    """A name that is equal for processes with the same clock."""
    try:
        return " ".join(Path(name).read_text(encoding="ascii") for name in _CLOCK_FILES)
    except OSError:
        return platform.node()


# Clock offsets


def clock_offsets(transport: Transport, machines: Sequence[str], clock: Clock) -> list[int]:
    """On rank 0, the nanoseconds by which every rank's clock is ahead of rank 0's. Collective.

    Only clocks of machines other than rank 0's are compared. Other ranks get zeros.
    """
    offsets = [0] * transport.size
    for peer, name in enumerate(machines):
        if name == machines[0]:
            continue
        if transport.rank == 0:
            offsets[peer] = min([_round_trip(transport, peer, clock) for _ in range(_ROUNDS)])[1]
        elif transport.rank == peer:
            _answer(transport, clock)
    return offsets


def _round_trip(transport: Transport, peer: int, clock: Clock) -> tuple[int, int]:
    """Duration of a round trip in nanoseconds, and the clock offset that follows from it."""
    request, reading = np.zeros(1, np.int64), np.empty(1, np.int64)
    start = clock()
    transport.exchange([(peer, request.data.cast("B"))], [(peer, reading.data.cast("B"))])
    end = clock()
    return end - start, int(reading[0]) - (start + end) // 2


def _answer(transport: Transport, clock: Clock) -> None:
    request, own = np.empty(1, np.int64), np.empty(1, np.int64)
    for _ in range(_ROUNDS):
        transport.exchange([], [(0, request.data.cast("B"))])
        own[0] = clock()
        transport.exchange([(0, own.data.cast("B"))], [])


# The file


def content(ranks: Sequence[RankCalls], offsets: Sequence[int]) -> dict[str, Any]:
    """The trace as JSON-compatible dicts; its clock is rank 0's, starting at the first call."""
    starts = [
        entry[3] - offset
        for each, offset in zip(ranks, offsets, strict=True)
        for entries in each.threads
        for entry in entries
    ]
    zero = min(starts, default=0)
    events = [
        event
        for rank, each in enumerate(ranks)
        for event in _events(rank, each.threads, zero + offsets[rank])
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _events(rank: int, threads: tuple[list[Entry], ...], zero: int) -> Iterator[dict[str, Any]]:
    yield _name(rank, 0, "process_name", f"rank {rank}")
    for thread, entries in enumerate(threads):
        yield _name(rank, thread, "thread_name", _THREADS[thread])
        for entry in entries:
            yield _event(rank, thread, entry, zero)


def _name(rank: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": {"name": name}}


def _event(rank: int, thread: int, entry: Entry, zero: int) -> dict[str, Any]:
    sequence, call, algorithm, start, end = entry
    return {
        "ph": "X",
        "name": call.collective,
        "cat": "collective",
        "pid": rank,
        "tid": thread,
        "ts": (start - zero) / 1e3,
        "dur": (end - start) / 1e3,
        "args": {
            "sequence": sequence,
            "nbytes": call.nbytes,
            "algorithm": algorithm,
            "call": str(call),
        },
    }
