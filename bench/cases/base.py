"""Interface of a collective to the benchmark."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from bench.problem import Array, DType, Problem
from bench.task import Allocate, Buffers, Task
from collectives import Communicator

Call: TypeAlias = Callable[[], Any]

AUTO = "auto"
"""The name, among those of algorithms, of the default selection."""


class Case(ABC):
    """One collective: its inputs, its results, its call and its share of the bus."""

    name: str
    out_of_place = True
    in_place = False
    reduces = False
    rooted = False
    has_bytes = True
    takes_algorithm = True
    takes_tensors = False

    @property
    def counterpart(self) -> str:
        """The name of the collective in other libraries."""
        return self.name

    def unit(self, ranks: int, tensors: int) -> int:
        """The number of elements is rounded up to a multiple of this number."""
        return 1

    def factor(self, ranks: int) -> float:
        """The part of the size that the busiest link must carry in any algorithm: busbw / algbw."""
        return 1.0

    def fullest(self, problem: Problem) -> int:
        """The rank than which none needs more memory."""
        return problem.root

    @abstractmethod
    def given(self, problem: Problem, rank: int) -> Array | None:
        """The rank's input, flat; None if it has none."""

    @abstractmethod
    def expected(self, problem: Problem, rank: int) -> Array | None:
        """The rank's expected result, flat; None if it has none."""

    @abstractmethod
    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """The call, ready for repetition; it returns the result."""

    def forms(self, problem: Problem) -> tuple[bool, ...]:
        """The supported forms: False for out of place, True for in place."""
        in_place = self.in_place and problem.result_dtype == problem.dtype
        return (False,) * self.out_of_place + (True,) * in_place

    def buffers(self, problem: Problem, rank: int, allocate: Allocate = np.empty) -> Buffers:
        """Memory for a rank; `allocate` is called alike on all ranks, so it may be collective."""

        def received(by: int) -> Array | None:
            return self.expected(problem, by) if self.out_of_place else None

        fullest = self.fullest(problem)
        most = self.given(problem, fullest), received(fullest)
        needed = self.given(problem, rank), received(rank)
        send, recv = (
            _room(allocate, each, part, problem.dtype)
            for each, part in zip(most, needed, strict=True)
        )
        return Buffers(lambda: self.given(problem, rank), send, recv)


def _room(allocate: Allocate, most: Array | None, needed: Array | None, dtype: DType) -> Array:
    """Memory for `needed`, allocated with the length of `most`."""
    if most is None:
        return np.empty(0, dtype)
    return allocate(most.size, most.dtype)[: 0 if needed is None else needed.size]


class CutCase(Case):
    """A collective whose buffer is cut into one block for each rank."""

    def unit(self, ranks: int, tensors: int) -> int:
        """A block for each rank."""
        return ranks

    def factor(self, ranks: int) -> float:
        """All blocks but the own one are sent."""
        return (ranks - 1) / ranks
