"""References for a measured all_reduce: the traffic model's ratio, and the memory's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from bench import traffic_model
from bench.cases.base import AUTO
from bench.problem import Problem
from bench.stream import Stream

MODELLED = "all_reduce"
MODELLED_PEER = "mpi4py"
# Below these sizes latency dominates, and the data of the model's memory traffic are in caches.
SMALLEST_MODELLED = 64 << 10
SMALLEST_STREAMED = 64 << 20


@dataclass(frozen=True)
class Yardstick:
    """References for one collective on the ranks of one node; None where none applies."""

    collective: str
    nodes: int
    registered: bool
    stream: Stream | None = None

    def ratio(
        self, problem: Problem, algorithm: str, theirs: Problem, *, in_place: bool
    ) -> tuple[float, float] | None:
        """The range of the ratio that the model predicts against MPI, whose problem is `theirs`."""
        if not self._covers(problem, algorithm):
            return None
        low, high = traffic_model.ratio(
            problem.ranks, is_registered=self.registered, in_place=in_place
        )
        scale = theirs.nbytes / problem.nbytes
        return low * scale, high * scale

    def of_stream(self, problem: Problem, algorithm: str, seconds: float) -> float | None:
        """The part of the memory's bandwidth that a call of that duration uses."""
        large = problem.nbytes >= SMALLEST_STREAMED
        if self.stream is None or not large or not self._covers(problem, algorithm):
            return None
        touched = traffic_model.touched(problem.ranks, is_registered=self.registered)
        return touched * problem.nbytes * problem.ranks / seconds / self.stream.add

    def _covers(self, problem: Problem, algorithm: str) -> bool:
        within_node = self.nodes == 1 < problem.ranks
        is_ours = self.collective == MODELLED and algorithm == AUTO
        return within_node and is_ours and problem.nbytes >= SMALLEST_MODELLED
