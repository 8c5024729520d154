"""What the cost model expects, what the simulation predicts, and what would be chosen.

Up to `LARGEST_PRICED` ranks the expected times and the choice are those of the library. Beyond, the
library prices nothing, and MPI's own collective runs. There the same rule is continued: the path of
least expected time. A schedule in which all ranks do the same is then priced by simulating one of
them on a network of one level, which gives the cost model's own estimate
(tests/bench/test_scale.py compares them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

from bench.scale.networks import Network, uniform
from bench.scale.programs import TooLargeError, program_of
from bench.scale.simulation import simulate
from collectives import algorithms
from collectives.execution.cost_model import LARGEST_PRICED, CostParameters, choose, expected
from collectives.schedules.paths import HIERARCHICAL, SHARED
from collectives.shm.copy_in_copy_out import CopyInCopyOut

# Times that differ by less are taken as equal, and crossing points are as precise.
_EQUAL = 1.01
_INNER = "all_reduce"


@dataclass(frozen=True)
class Prediction:
    """Seconds of each path of a collective, by the cost model and by simulation.

    `hierarchical` is followed by the schedule between the nodes, as in "hierarchical/ring".
    """

    network: str
    collective: str
    ranks: int
    nbytes: int
    modelled: dict[str, float]
    simulated: dict[str, float]
    automatic: str

    @property
    def best(self) -> str:
        """The first path whose simulated time is within 1 % of the least."""
        return _best(self.simulated)

    @property
    def excess(self) -> float:
        """Simulated time of the automatic choice over that of the best path."""
        return self.simulated[self.automatic] / min(self.simulated.values())


def _best(simulated: dict[str, float]) -> str:
    limit = _EQUAL * min(simulated.values())
    return next(path for path, seconds in simulated.items() if seconds <= limit)


def paths(network: Network, collective: str, ranks: int) -> list[str]:
    """The paths of a collective over messages, or in the memory of one node."""
    found = algorithms.names(collective)
    if ranks <= network.ranks_per_node:
        return [*found, SHARED] if hasattr(CopyInCopyOut, collective) else found
    if network.ranks_per_node > 1 and collective == _INNER:
        found += [f"{HIERARCHICAL}/{name}" for name in algorithms.names(_INNER)]
    return found


def predict(network: Network, collective: str, ranks: int, nbytes: int) -> Prediction:
    """All paths; those with too many different messages to simulate are missing.

    Raises ValueError for ranks that don't fill their nodes.
    """
    modelled: dict[str, float] = {}
    simulated: dict[str, float] = {}
    for path in paths(network, collective, ranks):
        try:
            simulated[path] = simulated_seconds(network, collective, path, ranks, nbytes)
            modelled[path] = _modelled(network, collective, path, ranks, nbytes)
        except TooLargeError:
            simulated.pop(path, None)
    automatic = _automatic(network, collective, ranks, nbytes, modelled)
    return Prediction(network.name, collective, ranks, nbytes, modelled, simulated, automatic)


def simulated_seconds(
    network: Network, collective: str, path: str, ranks: int, nbytes: float
) -> float:
    """By simulation; the memory of a node is priced by the cost model."""
    layout, costs = network.layout(ranks), network.costs(ranks)
    local = layout.local_sizes[0]
    kind, _, inner = path.partition("/")
    if kind == SHARED:
        return expected(collective, SHARED, round(nbytes), layout, costs)
    if kind == HIERARCHICAL:
        program = program_of(collective, inner, ranks, local, across=True)
        within = _within(network, ranks, nbytes)
        return costs.schedule_start + within + simulate(program, network, nbytes / local)
    program = program_of(collective, path, ranks, network.ranks_per_node)
    return costs.schedule_start + simulate(program, network, nbytes)


def _within(network: Network, ranks: int, nbytes: float) -> float:
    """What the hierarchical path takes in each node."""
    layout, costs = network.layout(ranks), network.costs(ranks)
    price = partial(expected, nbytes=round(nbytes), layout=layout, costs=costs, path=SHARED)
    return price("reduce_scatter") + price("all_gather")


def _modelled(network: Network, collective: str, path: str, ranks: int, nbytes: int) -> float:
    layout, costs = network.layout(ranks), network.costs(ranks)
    kind, _, inner = path.partition("/")
    if kind == SHARED:
        return expected(collective, SHARED, nbytes, layout, costs)
    if kind == HIERARCHICAL:
        local = layout.local_sizes[0]
        across = _schedule_seconds(collective, inner, ranks // local, -(-nbytes // local), costs)
        return _within(network, ranks, nbytes) + across
    return _schedule_seconds(collective, path, ranks, nbytes, costs)


@lru_cache(maxsize=4096)
def _schedule_seconds(
    collective: str, name: str, size: int, nbytes: int, costs: CostParameters
) -> float:
    """What the cost model expects of a schedule, at any size."""
    network = uniform(costs.schedule_link)
    if size > LARGEST_PRICED:
        program = program_of(collective, name, size, 1)
        if program.simulated == 1:
            return costs.schedule_start + simulate(program, network, nbytes)
    return expected(collective, name, nbytes, network.layout(size), costs)


def _automatic(
    network: Network, collective: str, ranks: int, nbytes: int, modelled: dict[str, float]
) -> str:
    """The library's own choice where it chooses by price; no native collective is offered."""
    least = min(modelled, key=lambda path: modelled[path])
    if ranks > LARGEST_PRICED:
        return least
    layout, costs = network.layout(ranks), network.costs(ranks)
    kinds = {path.partition("/")[0] for path in paths(network, collective, ranks)}
    offered = tuple(path for path in (SHARED, HIERARCHICAL) if path in kinds)
    chosen = choose(collective, nbytes, layout, offered, costs).algorithm
    if chosen != HIERARCHICAL:
        return chosen
    # The engine between the nodes chooses as one with a rank on each of them.
    local = layout.local_sizes[0]
    nodes = uniform(costs.schedule_link).layout(ranks // local)
    inner = choose(_INNER, -(-nbytes // local), nodes, (), costs).algorithm
    return f"{HIERARCHICAL}/{inner}"


@dataclass(frozen=True)
class Crossing:
    """Up to `nbytes` `before` is the best path, from there on `after`."""

    network: str
    collective: str
    ranks: int
    nbytes: int
    before: str
    after: str


def crossings(network: Network, predictions: Sequence[Prediction]) -> Iterator[Crossing]:
    """Where the best path changes, of predictions of one number of ranks, by rising size.

    Between two sizes with the same best path no change is looked for.
    """
    for small, large in pairwise(predictions):
        collective, ranks = small.collective, small.ranks
        best = partial(_best_of, network, collective, list(small.simulated), ranks)
        low, before = small.nbytes, small.best
        while before != large.best:
            high = large.nbytes
            while high > low * _EQUAL and high - low > 1:
                middle = round((low * high) ** 0.5)
                low, high = (middle, high) if best(middle) == before else (low, middle)
            after = best(high)
            yield Crossing(network.name, collective, ranks, high, before, after)
            low, before = high, after


def _best_of(
    network: Network, collective: str, among: Sequence[str], ranks: int, nbytes: int
) -> str:
    return _best(
        {each: simulated_seconds(network, collective, each, ranks, nbytes) for each in among}
    )
