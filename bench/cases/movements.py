"""broadcast, all_gather, gather, scatter, all_to_all and barrier."""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.cases.base import Call, Case, CutCase
from bench.problem import Array, Problem
from bench.task import Task
from collectives import Communicator


class Broadcast(Case):
    """The root's buffer is written into the others': always in place."""

    name = "broadcast"
    rooted = True
    out_of_place = False
    in_place = True

    def given(self, problem: Problem, rank: int) -> Array:
        """Different values on every rank, so that no other rank has the root's before the call."""
        return problem.values(rank, problem.count)

    def expected(self, problem: Problem, rank: int) -> Array:
        """The root's values."""
        return self.given(problem, problem.root)

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """In place."""
        return partial(comm.broadcast, task.send, root=task.problem.root, algorithm=algorithm)


class AllGather(CutCase):
    """Every rank receives all blocks."""

    name = "all_gather"

    def given(self, problem: Problem, rank: int) -> Array:
        """One block."""
        return problem.values(rank, problem.block)

    def expected(self, problem: Problem, rank: int) -> Array | None:
        """All blocks, in rank order."""
        return np.concatenate([self.given(problem, each) for each in range(problem.ranks)])

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out`."""
        return partial(comm.all_gather, task.send, out=task.out, algorithm=algorithm)


class Gather(AllGather):
    """The root receives all blocks."""

    name = "gather"
    rooted = True

    def expected(self, problem: Problem, rank: int) -> Array | None:
        """All blocks, on the root."""
        return super().expected(problem, rank) if rank == problem.root else None

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out`, which counts on the root alone."""
        root = task.problem.root
        return partial(comm.gather, task.send, root=root, out=task.out, algorithm=algorithm)


class Scatter(CutCase):
    """Every rank receives a block of the root's buffer."""

    name = "scatter"
    rooted = True

    def given(self, problem: Problem, rank: int) -> Array | None:
        """All blocks, on the root."""
        return problem.values(rank, problem.count) if rank == problem.root else None

    def expected(self, problem: Problem, rank: int) -> Array:
        """The rank's block."""
        return problem.values(problem.root, problem.count)[problem.block_of(rank)]

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out`."""
        array, root = task.send if task.on_root else None, task.problem.root
        return partial(comm.scatter, array, root=root, out=task.out, algorithm=algorithm)


class AllToAll(CutCase):
    """Block i goes to rank i."""

    name = "all_to_all"

    def given(self, problem: Problem, rank: int) -> Array:
        """A block for each rank."""
        return problem.values(rank, problem.count)

    def expected(self, problem: Problem, rank: int) -> Array:
        """A block from each rank."""
        sent = [self.given(problem, each) for each in range(problem.ranks)]
        return np.concatenate([array[problem.block_of(rank)] for array in sent])

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """One array as with MPI, with `out`."""
        return partial(comm.all_to_all, task.send, out=task.out, algorithm=algorithm)


class Barrier(Case):
    """Synchronization without data."""

    name = "barrier"
    has_bytes = False
    takes_algorithm = False

    def given(self, problem: Problem, rank: int) -> None:
        """Nothing."""

    def expected(self, problem: Problem, rank: int) -> None:
        """Nothing."""

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """Without arguments."""
        return comm.barrier
