"""From a problem to a row: times our call and the peer's on the same memory, checks both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.cases.base import Case
from bench.peers.base import Peer
from bench.problem import Array, Problem, count_wrong
from bench.rows import Measurement, PeerMeasurement, Row
from bench.task import Buffers, Task
from bench.timing import Subject, Timing, batch_of, interleave
from collectives import Communicator

AUTO = "auto"


@dataclass(frozen=True)
class Settings:
    """How long and how often."""

    repeats: int = 20
    warmup: int = 2
    rotate: int = 1
    calls: int | None = None
    registered: bool = False


class Bench:
    """One rank's part in measuring one collective. `world` is mpi4py's communicator of all."""

    def __init__(
        self,
        comm: Communicator,
        world: Any,
        case: Case,
        settings: Settings,
        peer: Peer | None = None,
    ) -> None:
        self._comm, self._world, self._case = comm, world, case
        self._settings, self._peer = settings, peer

    def try_out(self, problem: Problem, algorithm: str) -> None:
        """Call once. Raises what the collective raises where it can't do this, on every rank."""
        task = self._tasks(problem, self._case.forms(problem)[0], self._buffers(problem))[0]
        self._case.call(self._comm, task, _forced(algorithm))()

    def rows(self, problem: Problem, algorithms: Sequence[str]) -> list[Row]:
        """A row for each algorithm, all measured in the same memory."""
        buffers = self._buffers(problem)
        return [self._row(problem, algorithm, buffers) for algorithm in algorithms]

    def _buffers(self, problem: Problem) -> list[Buffers]:
        allocate = self._comm.empty if self._settings.registered else np.empty
        sets = range(self._settings.rotate)
        return [self._case.buffers(problem, self._comm.rank, allocate) for _ in sets]

    def _row(self, problem: Problem, algorithm: str, buffers: list[Buffers]) -> Row:
        forms = {
            form: self._measure(problem, algorithm, self._tasks(problem, form, buffers))
            for form in self._case.forms(problem)
        }
        return Row(
            nbytes=problem.nbytes if self._case.has_bytes else 0,
            count=problem.count if self._case.has_bytes else 0,
            dtype=problem.dtype.name,
            op=problem.op if self._case.reduces else None,
            root=problem.root if self._case.rooted else None,
            algorithm=algorithm,
            out_of_place=forms.get(False),
            in_place=forms.get(True),
        )

    def _tasks(self, problem: Problem, in_place: bool, buffers: list[Buffers]) -> list[Task]:
        return [Task(problem, self._comm.rank, each, in_place) for each in buffers]

    def _measure(self, problem: Problem, algorithm: str, tasks: list[Task]) -> Measurement:
        subjects = [self._ours(tasks, algorithm), *self._theirs(tasks)]
        nbytes = problem.nbytes if self._case.has_bytes else 0
        batch = self._settings.calls or batch_of(nbytes)
        _reset(tasks)
        seconds = interleave(
            subjects,
            self._world,
            batch=batch,
            warmup=self._settings.warmup,
            repeats=self._settings.repeats,
        )
        wrong = [self._check(subject, tasks, batch) for subject in subjects]
        timing = Timing.of(seconds[0])
        algbw = nbytes / timing.median
        return Measurement(
            seconds=timing,
            algbw=algbw,
            busbw=algbw * self._case.factor(problem.ranks),
            wrong=wrong[0],
            peer=_compared(seconds, wrong) if len(subjects) > 1 else None,
        )

    def _ours(self, tasks: list[Task], algorithm: str) -> Subject:
        forced = _forced(algorithm)
        return Subject([(self._case.call(self._comm, task, forced), None) for task in tasks])

    def _theirs(self, tasks: list[Task]) -> list[Subject]:
        if self._peer is None:
            return []
        found = [(self._peer.call(self._case.name, task), task.out) for task in tasks]
        calls = [(call, out) for call, out in found if call is not None]
        return [Subject(calls)] if calls else []

    def _check(self, subject: Subject, tasks: list[Task], batch: int) -> int:
        """Wrong elements on all ranks after one more batch, on fresh inputs and poisoned outputs.

        In place it is a single call, since a second would fold the first one's result.
        """
        problem, in_place = tasks[0].problem, tasks[0].in_place
        _reset(tasks)
        result = subject.run(1 if in_place else batch)
        wrong = count_wrong(result, self._case.expected(problem, self._comm.rank))
        total: int = self._world.allreduce(wrong)
        return total


def _reset(tasks: list[Task]) -> None:
    for task in tasks:
        task.buffers.reset()


def _compared(seconds: Array, wrong: list[int]) -> PeerMeasurement:
    ours, theirs = seconds
    return PeerMeasurement(Timing.of(theirs), float(np.median(theirs / ours)), wrong[1])


def _forced(algorithm: str) -> str | None:
    return None if algorithm == AUTO else algorithm
