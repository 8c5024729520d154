"""The asynchronous form of a collective: each call is started, and waited for at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from bench.cases.base import Call, Case
from bench.problem import Array, Problem
from bench.task import Task
from collectives import Communicator


class Asynchronous(Case):
    """Another case's collective, inputs and results."""

    nonblocking = True

    def __init__(self, case: Case) -> None:
        self._case, self.name = case, case.name
        self.out_of_place, self.in_place = case.out_of_place, case.in_place
        self.reduces, self.rooted, self.has_bytes = case.reduces, case.rooted, case.has_bytes
        self.takes_algorithm, self.takes_tensors = case.takes_algorithm, case.takes_tensors

    def unit(self, ranks: int, tensors: int) -> int:
        """As of the blocking call."""
        return self._case.unit(ranks, tensors)

    def factor(self, ranks: int) -> float:
        """As of the blocking call."""
        return self._case.factor(ranks)

    def fullest(self, problem: Problem) -> int:
        """As of the blocking call."""
        return self._case.fullest(problem)

    def given(self, problem: Problem, rank: int) -> Array | None:
        """As of the blocking call."""
        return self._case.given(problem, rank)

    def expected(self, problem: Problem, rank: int) -> Array | None:
        """As of the blocking call."""
        return self._case.expected(problem, rank)

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """The start of the call, and the wait for it."""
        return self._case.call(cast(Communicator, _Waiting(comm)), task, algorithm)


class _Waiting:
    """A communicator whose calls are asynchronous, each with its wait."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Callable[..., Any]:
        start = getattr(self._comm, f"{name}_async")

        def call(*arguments: Any, **named: Any) -> Any:
            return start(*arguments, **named).wait()

        return call
