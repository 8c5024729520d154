"""Measurement of a problem on GPUs: our call, the bare NCCL call and the replayed graph."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.cases.base import Call, Case
from bench.gpu.bare import Bare, transport_of
from bench.gpu.device import Device
from bench.gpu.memory import buffer_sets, on_host
from bench.measure import Settings, Side
from bench.problem import Array, Problem, count_wrong
from bench.rows import Measurement, PeerMeasurement, Row
from bench.task import Buffers, Task
from bench.timing import Subject, Timing, interleave
from collectives import Communicator
from collectives.cuda.interface import Cuda

LEAST_BATCH = 20
ALGORITHM = "auto"
# The others allocate memory, which a graph must not get from a pool; so does reduce on other ranks.
_CAPTURED = {"all_reduce", "all_reduce_many", "reduce_scatter", "broadcast", "all_gather"}
# Sets of many tensors to cycle, and the most that a graph takes: the tables of few lists are kept.
_LISTS = 4


class GpuBench:
    """One rank's part in measuring. All work is enqueued on the current stream.

    `world` is mpi4py's communicator of all.
    """

    def __init__(
        self, comm: Communicator, world: Any, cuda: Cuda, device: Device, settings: Settings
    ) -> None:
        """`settings.rotate` 0 selects as many sets of buffers as exceed the GPU's cache."""
        self._comm, self._world, self._cuda, self._device = comm, world, cuda, device
        self._settings = settings
        transport = transport_of(comm)
        self._bare = None if transport is None else Bare(transport, cuda)

    def row(self, case: Case, problem: Problem) -> Row:
        """All forms, measured in the same memory."""
        rank, settings = self._comm.rank, self._settings
        rotate = settings.rotate or (_LISTS if case.takes_tensors else None)
        sets = buffer_sets(case, problem, rank, self._cuda, rotate, self._device.l2_bytes)
        forms = {form: self._measure(case, problem, sets, form) for form in case.forms(problem)}
        return Row(
            nbytes=problem.nbytes,
            count=problem.count,
            dtype=problem.dtype.name,
            op=problem.op if case.reduces else None,
            root=problem.root if case.rooted else None,
            algorithm=ALGORITHM,
            out_of_place=forms.get(False),
            in_place=forms.get(True),
        )

    def _measure(
        self, case: Case, problem: Problem, sets: list[Buffers], in_place: bool
    ) -> Measurement:
        tasks = [Task(problem, self._comm.rank, each, in_place) for each in sets]
        batch = self._settings.calls or max(LEAST_BATCH, len(sets))
        ours = _side([case.call(self._comm, task, None) for task in tasks], tasks, returns=True)
        sides = [ours, *self._bare_side(case, tasks)]
        for side in sides:
            side.reset()
        seconds = self._time([side.subject for side in sides], batch)
        wrong = [self._check(case, side, batch) for side in sides]
        graph, graph_wrong = self._graph(case, ours, batch)
        timing = Timing.of(seconds[0])
        algbw = problem.nbytes / timing.median
        return Measurement(
            seconds=timing,
            algbw=algbw,
            busbw=algbw * case.factor(problem.ranks),
            wrong=wrong[0] + graph_wrong,
            peer=PeerMeasurement.of(seconds, wrong[1]) if len(sides) > 1 else None,
            graph=graph,
        )

    def _time(self, subjects: list[Subject], batch: int) -> Array:
        settings = self._settings
        return interleave(
            subjects,
            self._world,
            batch=batch,
            warmup=settings.warmup,
            repeats=settings.repeats,
            stopwatch=self._device.seconds,
        )

    def _bare_side(self, case: Case, tasks: list[Task]) -> list[Side]:
        """NCCL's own call, if it has an equivalent."""
        if self._bare is None:
            return []
        calls = [self._bare.call(case.name, task) for task in tasks]
        found = [call for call in calls if call is not None]
        return [_side(found, tasks, returns=False)] if found else []

    def _graph(self, case: Case, ours: Side, batch: int) -> tuple[Timing | None, int]:
        """A batch of calls in one graph, like nccl-tests; and the number of wrong elements."""
        if case.name not in _CAPTURED or self._bare is None:
            # Calls staged through the host can't be captured.
            return None, 0
        if case.takes_tensors and len(ours.tasks) > _LISTS:
            return None, 0
        replay = self._device.capture(partial(ours.subject.run, batch))
        ours.reset()
        seconds = self._time([Subject([(replay, None)])], 1) / batch
        if ours.tasks[0].in_place:
            # Each call of the batch has folded the result of the one before.
            return Timing.of(seconds[0]), 0
        ours.reset()
        replay()
        if batch < len(ours.tasks):
            # Possibly none of the calls has written the first set.
            return Timing.of(seconds[0]), 0
        first = ours.tasks[0]
        return Timing.of(seconds[0]), self._count(case, first.problem, first.out)

    def _check(self, case: Case, side: Side, batch: int) -> int:
        """Wrong elements on all ranks after one more batch; in place after a single call."""
        side.reset()
        result = side.subject.run(1 if side.tasks[0].in_place else batch)
        return self._count(case, side.tasks[0].problem, result)

    def _count(self, case: Case, problem: Problem, result: Any) -> int:
        expected = case.expected(problem, self._comm.rank)
        total: int = self._world.allreduce(count_wrong(on_host(result), expected))
        return total


def _side(calls: list[Call], tasks: list[Task], *, returns: bool) -> Side:
    """Calls that return their results, or that write them into their task's `out`."""
    outputs = [None if returns else task.out for task in tasks]
    return Side(Subject(list(zip(calls, outputs, strict=True))), tasks)
