"""Cost model: selects the path of a call for which the caller names none.

The model prices every schedule with the parameters of a link, the transport's native collective as
the cheapest schedule without Python's share of the latency, and shared memory by the bytes that a
rank touches. The choice depends only on what is equal on all ranks (collective, bytes, layout,
cost parameters), so that all ranks choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from collectives import algorithms
from collectives.analysis.cost import Link, estimate
from collectives.schedules.paths import HIERARCHICAL, NATIVE, SHARED
from collectives.schedules.spec import spec_of

PRICED = (NATIVE, SHARED, HIERARCHICAL)
"""The paths, besides the schedules, that the model can price."""

# Pricing a schedule takes time proportional to ranks × rounds. Above this number of ranks the first
# of the paths besides the schedules is chosen unpriced.
LARGEST_PRICED = 512

# Bytes of a message, and how many times the least expected time the ring may be expected to take
# from there on. Large messages of patterns in which a rank changes its peers, and those of MPI's
# own, delay each other and their acknowledgements on links with long queues, which the model
# doesn't know: between 3 and 4 hosts of 1 Gbit/s, all_reduce of 16 MiB takes 1.5 to 3 times as long
# by them as by the ring (bench/results/README.md). Beyond these factors, as after `tune` on a link
# that MPI's own uses better, the ring isn't taken. Two ranks have no other neighbors; an array that
# they reduce, on a core each, takes less time in halves, each folded by one of them, than by MPI.
_RING = "ring"
_RING_GAINS = ((512 << 10, 2.0), (256 << 10, 1.1))
_RING_GAINS_OF_TWO = ((2 << 20, 2.0),)
_RING_GAINS_OF_TWO_REDUCED = ((512 << 10, 2.0),)
_CHANGING = (NATIVE, "rabenseifner", "circulant", "doubling")


@dataclass(frozen=True)
class CostParameters:
    """Measured costs of the paths; the defaults are those of bench/results/.

    Starts and latencies are in seconds, bandwidths in bytes per second. `shared_bandwidth` counts
    the bytes that one rank reads or writes in the node's memory while all others do the same.
    """

    schedule_start: float = 6e-6
    schedule_latency: float = 4e-6
    schedule_bandwidth: float = 7e9
    native_start: float = 5e-6
    native_latency: float = 1e-6
    native_bandwidth: float = 8e9
    native_move_bandwidth: float = 12e9
    reduction: float = 20e9
    shared_start: float = 3e-6
    shared_latency: float = 0.5e-6
    shared_bandwidth: float = 36e9

    @property
    def schedule_link(self) -> Link:
        """A message of a schedule."""
        return Link(self.schedule_latency, self.schedule_bandwidth, self.reduction)


@dataclass(frozen=True)
class Layout:
    """Number of ranks on each node, and the oversubscription of the cores."""

    local_sizes: tuple[int, ...]
    oversubscription: float = 1.0
    """Ranks per core on the fullest node, at least 1."""

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return sum(self.local_sizes)


BUILT_IN = "built-in parameters"


def built_in(layout: Layout) -> CostParameters:
    """The parameters where nothing was measured.

    Between nodes those of a link of 10 Gbit/s; ranks of a node that wait for messages arrive one by
    one at what follows in the node's memory.
    """
    if len(layout.local_sizes) == 1:
        return CostParameters()
    link = 1.25e9
    return CostParameters(
        schedule_latency=10e-6,
        schedule_bandwidth=link,
        native_latency=5e-6,
        native_bandwidth=link,
        native_move_bandwidth=link,
        shared_start=20e-6,
    )


@dataclass(frozen=True)
class Choice:
    """The selected path, and the expected time of each candidate in seconds."""

    algorithm: str
    seconds: dict[str, float]
    reason: str = "least expected time"

    def __str__(self) -> str:
        """One line for each candidate, the fastest first."""
        ranked = sorted(self.seconds.items(), key=lambda item: item[1])
        lines = (f"  {name:<22}{seconds * 1e6:12.1f} µs expected" for name, seconds in ranked)
        first = f"{self.algorithm} runs: {self.reason}" if self.reason else f"{self.algorithm} runs"
        return "\n".join([first, *lines])


def choose(
    collective: str, nbytes: int, layout: Layout, paths: tuple[str, ...], costs: CostParameters
) -> Choice:
    """The candidate of least expected time for `nbytes` bytes, counted as in `estimate`.

    `paths` are the available paths besides the schedules.
    """
    return _choose(collective, tuple(algorithms.names(collective)), nbytes, layout, paths, costs)


@lru_cache(maxsize=1024)
def _choose(
    collective: str,
    names: tuple[str, ...],
    nbytes: int,
    layout: Layout,
    paths: tuple[str, ...],
    costs: CostParameters,
) -> Choice:
    size = layout.size
    if size == 1:
        return Choice("a copy", {}, "")
    if size > LARGEST_PRICED and paths:
        return Choice(paths[0], {}, f"with more than {LARGEST_PRICED} ranks nothing is priced")
    seconds = {name: expected(collective, name, nbytes, layout, costs) for name in (*names, *paths)}
    best = min(seconds, key=lambda name: seconds[name])
    if len(layout.local_sizes) > 1 and best in _CHANGING:
        gain = _ring_gain(collective, nbytes, layout)
        if seconds.get(_RING, math.inf) <= gain * seconds[best]:
            return Choice(_RING, seconds, "large messages to one neighbor, from another one")
    return Choice(best, seconds)


def _ring_gain(collective: str, nbytes: int, layout: Layout) -> float:
    """How many times as long the ring may be expected to take, and yet be taken."""
    gains: tuple[tuple[int, float], ...] = _RING_GAINS
    if layout.size == 2:
        reduced = collective == "all_reduce" and layout.oversubscription == 1
        gains = _RING_GAINS_OF_TWO_REDUCED if reduced else _RING_GAINS_OF_TWO
    return next((gain for message, gain in gains if nbytes >= message * layout.size), 0.0)


def expected(
    collective: str, path: str, nbytes: int, layout: Layout, costs: CostParameters
) -> float:
    """Expected seconds of a path; `nbytes` is counted as in `estimate`.

    Ranks that share a core run one after the other, so oversubscription multiplies the time.
    """
    if path == NATIVE:
        seconds = _native(collective, layout, nbytes, costs)
    elif path == SHARED:
        seconds = _shared(collective, nbytes, layout, costs)
    elif path == HIERARCHICAL:
        seconds = _hierarchical(collective, nbytes, layout, costs)
    else:
        link = costs.schedule_link
        inside = estimate(collective, path, layout.size, nbytes, link)
        seconds = costs.schedule_start + inside
    return layout.oversubscription * seconds


def _native(collective: str, layout: Layout, nbytes: int, costs: CostParameters) -> float:
    size = layout.size
    # What isn't folded the library copies directly.
    reduces = spec_of(collective).reduces
    bandwidth = costs.native_bandwidth if reduces else costs.native_move_bandwidth
    link = Link(costs.native_latency, bandwidth, costs.reduction)
    names = algorithms.names(collective)
    if len(layout.local_sizes) > 1 and collective in _ALONG_TREES:
        names = [_TREE]
    inside = min(estimate(collective, name, size, nbytes, link) for name in names)
    if collective == "all_reduce" and size & (size - 1):
        # MPICH and Open MPI fold the ranks beyond a power of two into others first, and send them
        # the result: whole buffers.
        inside += 2 * (link.latency + nbytes / link.bandwidth) + nbytes / link.reduction
    return costs.native_start + inside


# Between nodes MPICH and Open MPI send large arrays of these along trees, whole in each round.
_ALONG_TREES, _TREE = ("broadcast", "reduce"), "binomial"

# Bytes that a rank touches for each byte of the buffer, by the number of ranks.
_TOUCHED: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 5.0 if size == 2 else 5 - 1 / size,
    "reduce": lambda size: 5 - 1 / size,
    "reduce_scatter": lambda size: 5 * (size - 1) / size,
    # The readers wait for cache lines that the root has just written.
    "broadcast": lambda size: 4.0,
    "all_gather": lambda size: 2.0,
    "gather": lambda size: 2.0,
    "scatter": lambda size: 2.0,
    "all_to_all": lambda size: 4 * (size - 1) / size,
}


def _shared(collective: str, nbytes: int, layout: Layout, costs: CostParameters) -> float:
    size = max(layout.local_sizes)
    touched = _TOUCHED[collective](size) * nbytes / costs.shared_bandwidth
    waits = costs.shared_latency * size
    return costs.shared_start + waits + touched


# The collectives within the nodes, besides the one between ranks of equal local rank.
_WITHIN: dict[str, tuple[str, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce": ("reduce_scatter", "gather"),
    "broadcast": ("broadcast", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
}


def _hierarchical(collective: str, nbytes: int, layout: Layout, costs: CostParameters) -> float:
    """Within the nodes, and between ranks of equal local rank."""
    slices = min(layout.local_sizes)
    nodes, slice_bytes, link = len(layout.local_sizes), -(-nbytes // slices), costs.schedule_link
    across = min(
        estimate(collective, name, nodes, slice_bytes, link)
        for name in algorithms.names(collective)
    )
    within = [_shared(each, nbytes, layout, costs) for each in _WITHIN[collective]]
    return sum(within) + costs.schedule_start + across


def bucket_of(nbytes: int) -> int:
    """The size class that is priced for a call: the next power of two."""
    return 1 << max(nbytes - 1, 0).bit_length()
