"""Timing: repeats of batches of calls, alternating between the subjects that are compared.

A repeat is a barrier followed by a batch of calls, long enough to time calls of microseconds. Its
time is that of the slowest rank. The barrier is always MPI's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeAlias

import numpy as np

from bench.cases.base import Call
from bench.problem import Array

_BATCH_BYTES = 1 << 20
_LARGEST_BATCH = 200

WARMUP_CALLS = 24
"""Calls before a measurement: the selection of a data path tries up to 4 paths, 6 times each."""

Stopwatch: TypeAlias = Callable[[Callable[[], Any]], float]
"""Runs some work and returns its duration in seconds."""


def batch_of(nbytes: int) -> int:
    """Number of calls in a repeat: as many as move a mebibyte, at most 200."""
    return min(_LARGEST_BATCH, max(1, _BATCH_BYTES // max(nbytes, 1)))


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the repeats."""

    median: float
    minimum: float
    p90: float

    @classmethod
    def of(cls, seconds: Array) -> Timing:
        """From the seconds of each repeat."""
        median, p90 = np.percentile(seconds, [50, 90]).tolist()
        return cls(median, float(seconds.min()), p90)


class Subject:
    """What is timed: the same call for each set of buffers, one set after the other.

    A call is paired with the array that it writes, or with None if it returns its result.
    """

    def __init__(self, calls: Sequence[tuple[Call, Array | None]]) -> None:
        self._calls = cycle(calls)

    def run(self, batch: int) -> Any:
        """Run a batch of calls; returns the last one's result."""
        result = None
        for call, out in islice(self._calls, batch):
            returned = call()
            result = returned if out is None else out
        return result


def wall_seconds(work: Callable[[], Any]) -> float:
    """Stopwatch for calls that are complete when they return."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def enqueue_seconds(synchronize: Callable[[], object]) -> Stopwatch:
    """Stopwatch of the host's time for calls that a GPU executes; `synchronize` waits for it."""

    def seconds(work: Callable[[], Any]) -> float:
        synchronize()
        taken = wall_seconds(work)
        # Queued work must not slow down the next call.
        synchronize()
        return taken

    return seconds


def interleave(
    subjects: Sequence[Subject],
    world: Any,
    *,
    batch: int,
    warmup: int,
    repeats: int,
    stopwatch: Stopwatch = wall_seconds,
) -> Array:
    """Seconds per call of each (subject, repeat), in the order A B, B A, A B and so on.

    At least `warmup` calls of each subject come before, in batches too.
    """
    seconds = np.zeros((len(subjects), repeats))
    before = math.ceil(warmup / batch)
    for repeat in range(-before, repeats):
        order = range(len(subjects))
        for index in order if repeat % 2 == 0 else reversed(order):
            world.Barrier()
            taken = stopwatch(partial(subjects[index].run, batch)) / batch
            if repeat >= 0:
                seconds[index, repeat] = taken
    return _slowest(seconds, world)


def medians(
    calls: Sequence[Call],
    world: Any,
    *,
    batch: int,
    repeats: int,
    warmup: int = WARMUP_CALLS,
    stopwatch: Stopwatch = wall_seconds,
) -> Array:
    """Median seconds of each of the calls, which take turns and return their results."""
    subjects = [Subject([(call, None)]) for call in calls]
    seconds = interleave(
        subjects, world, batch=batch, warmup=warmup, repeats=repeats, stopwatch=stopwatch
    )
    return np.median(seconds, axis=1)


def _slowest(seconds: Array, world: Any) -> Array:
    slowest: Array = np.max(world.allgather(seconds), axis=0)
    return slowest
