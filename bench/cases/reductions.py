"""all_reduce, all_reduce_many, reduce, reduce_scatter, scan and exscan."""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.cases.base import Call, Case, CutCase
from bench.problem import Array, Problem
from bench.task import Task
from collectives import Communicator


class _Reduction(Case):
    """A reduction of whole buffers."""

    reduces = True

    def given(self, problem: Problem, rank: int) -> Array:
        """A whole buffer."""
        return problem.values(rank, problem.count)

    def expected(self, problem: Problem, rank: int) -> Array | None:
        """The whole reduction."""
        return problem.folded(problem.count)


class AllReduce(_Reduction):
    """Every rank receives the reduction."""

    name = "all_reduce"
    in_place = True

    def factor(self, ranks: int) -> float:
        """Every block is sent to be folded, and its result is sent back."""
        return 2 * (ranks - 1) / ranks

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out`, in both forms."""
        op = task.problem.op
        return partial(comm.all_reduce, task.send, op, out=task.out, algorithm=algorithm)


class AllReduceMany(AllReduce):
    """Many tensors in one call, adjacent in memory."""

    name = "all_reduce_many"
    takes_algorithm = False
    takes_tensors = True

    def unit(self, ranks: int, tensors: int) -> int:
        """Tensors of equal length."""
        return tensors

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out`, in both forms."""
        tensors = np.split(task.send, task.problem.tensors)
        out = np.split(task.out, task.problem.tensors)
        return partial(comm.all_reduce_many, tensors, task.problem.op, out=out)


class PersistentAllReduceMany(AllReduceMany):
    """The same in a persistent call."""

    name = "persistent_all_reduce_many"

    @property
    def counterpart(self) -> str:
        """Calls that are made anew each time."""
        return AllReduceMany.name

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out`, in both forms."""
        tensors, out = (np.split(each, task.problem.tensors) for each in (task.send, task.out))
        return comm.persistent_all_reduce_many(tensors, task.problem.op, out=out)


class Reduce(_Reduction):
    """The root receives the reduction."""

    name = "reduce"
    rooted = True
    in_place = True

    def expected(self, problem: Problem, rank: int) -> Array | None:
        """The whole reduction, on the root."""
        return problem.folded(problem.count) if rank == problem.root else None

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out` on the root, in both forms."""
        op, root = task.problem.op, task.problem.root
        out = task.out if task.on_root else None
        return partial(comm.reduce, task.send, op, root=root, out=out, algorithm=algorithm)


class ReduceScatter(CutCase, _Reduction):
    """Rank r receives block r of the reduction."""

    name = "reduce_scatter"

    def expected(self, problem: Problem, rank: int) -> Array:
        """The rank's block."""
        return problem.folded(problem.count)[problem.block_of(rank)]

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out`."""
        op = task.problem.op
        return partial(comm.reduce_scatter, task.send, op, out=task.out, algorithm=algorithm)


class Scan(_Reduction):
    """Rank r receives the reduction of the inputs of ranks 0 to r."""

    name = "scan"
    in_place = True

    def expected(self, problem: Problem, rank: int) -> Array | None:
        """The reduction up to the rank."""
        return problem.folded(problem.count, rank + 1)

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out`, in both forms."""
        op = task.problem.op
        return partial(comm.scan, task.send, op, out=task.out, algorithm=algorithm)


class Exscan(_Reduction):
    """Rank r receives the reduction of the inputs of ranks 0 to r - 1.

    Rank 0 has no result in MPI, and none is checked.
    """

    name = "exscan"
    in_place = True

    def fullest(self, problem: Problem) -> int:
        """The last rank."""
        return problem.ranks - 1

    def expected(self, problem: Problem, rank: int) -> Array | None:
        """The reduction up to the rank before; None on rank 0."""
        return problem.folded(problem.count, rank) if rank else None

    def call(self, comm: Communicator, task: Task, algorithm: str | None) -> Call:
        """With `out` on the ranks that have a result, in both forms."""
        op, out = task.problem.op, task.out if task.rank else None
        return partial(comm.exscan, task.send, op, out=out, algorithm=algorithm)
