"""Measurement of a problem: times our call and the peer's on the same memory, checks both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.asynchronous import waiting
from bench.cases.base import AUTO, Case
from bench.peers.base import Peer
from bench.problem import Array, Problem, count_wrong
from bench.rows import Measurement, PeerMeasurement, Row
from bench.stream import Stream
from bench.task import Buffers, Task
from bench.timing import WARMUP_CALLS, Subject, Timing, batch_of, interleave
from bench.yardstick import MODELLED_PEER, Yardstick
from collectives import Communicator


@dataclass(frozen=True)
class Settings:
    """Number of repeats and calls, and kind of buffers."""

    repeats: int = 20
    warmup: int = WARMUP_CALLS
    rotate: int = 1
    calls: int | None = None
    registered: bool = False
    asynchronous: bool = False


@dataclass(frozen=True)
class _Memory:
    """The buffer sets for one problem."""

    problem: Problem
    sets: list[Buffers]

    def tasks(self, rank: int, in_place: bool) -> list[Task]:
        """A task on each set."""
        return [Task(self.problem, rank, each, in_place) for each in self.sets]


@dataclass(frozen=True)
class Side:
    """What is timed, and its tasks."""

    subject: Subject
    tasks: list[Task]

    def reset(self) -> None:
        """Restore the inputs and poison the outputs."""
        for task in self.tasks:
            task.buffers.reset()


class Bench:
    """One rank's part in measuring one collective. `world` is mpi4py's communicator of all."""

    def __init__(
        self,
        comm: Communicator,
        world: Any,
        case: Case,
        settings: Settings,
        peer: Peer | None = None,
        stream: Stream | None = None,
    ) -> None:
        self._comm, self._world, self._case = comm, world, case
        self._caller = waiting(comm) if settings.asynchronous else comm
        self._settings, self._peer = settings, peer
        self._yardstick = Yardstick(case.name, comm.nodes, settings.registered, stream)

    def try_out(self, problem: Problem, algorithm: str) -> None:
        """Call once. Raises the collective's exception, on every rank, if it is not supported."""
        form = self._case.forms(problem)[0]
        task = self._memory(problem).tasks(self._comm.rank, form)[0]
        self._case.call(self._caller, task, _forced(algorithm))()

    def rows(self, problem: Problem, algorithms: Sequence[str]) -> list[Row]:
        """One row for each algorithm, all measured in the same memory."""
        ours = self._memory(problem)
        theirs = self._their_memory(ours)
        return [self._row(algorithm, ours, theirs) for algorithm in algorithms]

    def _memory(self, problem: Problem) -> _Memory:
        allocate = self._comm.empty if self._settings.registered else np.empty
        sets = range(self._settings.rotate)
        rank = self._comm.rank
        return _Memory(problem, [self._case.buffers(problem, rank, allocate) for _ in sets])

    def _their_memory(self, ours: _Memory) -> _Memory:
        """The same memory, unless the peer reduces another dtype."""
        given = ours.problem.dtype
        if self._peer is None or not self._case.reduces or self._peer.dtype_for(given) == given:
            return ours
        return self._memory(replace(ours.problem, dtype=self._peer.dtype_for(given)))

    def _row(self, algorithm: str, ours: _Memory, theirs: _Memory) -> Row:
        problem, rank = ours.problem, self._comm.rank
        forms = {
            form: self._measure(algorithm, ours.tasks(rank, form), theirs.tasks(rank, form))
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

    def _measure(
        self, algorithm: str, our_tasks: list[Task], their_tasks: list[Task]
    ) -> Measurement:
        problem = our_tasks[0].problem
        sides = [self._ours(our_tasks, algorithm), *self._theirs(their_tasks)]
        nbytes = problem.nbytes if self._case.has_bytes else 0
        batch = self._settings.calls or batch_of(nbytes)
        for side in sides:
            side.reset()
        seconds = interleave(
            [side.subject for side in sides],
            self._world,
            batch=batch,
            warmup=self._settings.warmup,
            repeats=self._settings.repeats,
        )
        wrong = [self._check(side) for side in sides]
        timing = Timing.of(seconds[0])
        algbw = nbytes / timing.median
        return Measurement(
            seconds=timing,
            algbw=algbw,
            busbw=algbw * self._case.factor(problem.ranks),
            wrong=wrong[0],
            of_stream=self._yardstick.of_stream(problem, algorithm, timing.median),
            peer=self._compared(seconds, wrong[1], algorithm, sides) if len(sides) > 1 else None,
        )

    def _ours(self, tasks: list[Task], algorithm: str) -> Side:
        forced = _forced(algorithm)
        calls = [(self._case.call(self._caller, task, forced), None) for task in tasks]
        return Side(Subject(calls), tasks)

    def _theirs(self, tasks: list[Task]) -> list[Side]:
        if self._peer is None:
            return []
        peer, nonblocking = self._peer, self._settings.asynchronous
        found = [
            (peer.call(self._case.counterpart, task, nonblocking=nonblocking), task.out)
            for task in tasks
        ]
        calls = [(call, out) for call, out in found if call is not None]
        return [Side(Subject(calls), tasks)] if calls else []

    def _compared(
        self, seconds: Array, wrong: int, algorithm: str, sides: list[Side]
    ) -> PeerMeasurement:
        ours, theirs = (side.tasks[0] for side in sides)
        return PeerMeasurement.of(seconds, wrong, self._model(algorithm, ours, theirs))

    def _model(self, algorithm: str, ours: Task, theirs: Task) -> tuple[float, float] | None:
        if self._peer is None or self._peer.name != MODELLED_PEER:
            return None
        ratio = self._yardstick.ratio
        return ratio(ours.problem, algorithm, theirs.problem, in_place=ours.in_place)

    def _check(self, side: Side) -> int:
        """Wrong elements on all ranks after one more call, on fresh inputs and poisoned outputs.

        A single call: others may fill the outputs by another path, and in place fold its result.
        """
        problem = side.tasks[0].problem
        side.reset()
        result = side.subject.run(1)
        wrong = count_wrong(result, self._case.expected(problem, self._comm.rank))
        total: int = self._world.allreduce(wrong)
        return total


def _forced(algorithm: str) -> str | None:
    return None if algorithm == AUTO else algorithm
