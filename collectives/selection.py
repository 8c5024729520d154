"""Which algorithm runs, where the caller names none.

The cost model prices every schedule with built-in figures of a link, and the transport's native
collective as the cheapest schedule without Python's share of the latency. The choice depends only
on what all ranks know (collective, bytes, ranks), so that all choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from collectives import algorithms
from collectives.cost import Link, estimate

# Two ranks over shared memory, fitted to bench/results/: what a schedule costs to start, a round of
# it, and a round inside the MPI library.
SCHEDULE_START = 6e-6
SCHEDULE_LINK = Link(latency=4e-6, bandwidth=9e9, reduction=20e9)
NATIVE_LINK = Link(latency=1e-6, bandwidth=8e9, reduction=20e9)

# Pricing a schedule takes time proportional to ranks × rounds: above this size only those of
# logarithmic depth and the ring's closed form would be worth it, so native is taken unpriced.
_LARGEST_PRICED = 512


@dataclass(frozen=True)
class Choice:
    """What runs, and what each candidate was expected to take, in seconds."""

    algorithm: str
    seconds: dict[str, float]

    def __str__(self) -> str:
        """One line for each candidate, the fastest first."""
        ranked = sorted(self.seconds.items(), key=lambda item: item[1])
        lines = (f"  {name:<22}{seconds * 1e6:12.1f} µs expected" for name, seconds in ranked)
        return "\n".join([f"{self.algorithm} runs", *lines])


def choose(collective: str, nbytes: int, size: int, has_native: bool) -> Choice:
    """The candidate of least expected time for `nbytes` bytes, counted as in `cost.traffic`."""
    return _choose(collective, tuple(algorithms.names(collective)), nbytes, size, has_native)


@lru_cache(maxsize=1024)
def _choose(
    collective: str, names: tuple[str, ...], nbytes: int, size: int, has_native: bool
) -> Choice:
    if size == 1:
        return Choice("a copy", {})
    if size > _LARGEST_PRICED and has_native:
        return Choice("native", {})
    seconds = {
        name: SCHEDULE_START + estimate(collective, name, size, nbytes, SCHEDULE_LINK)
        for name in names
    }
    if has_native:
        seconds["native"] = min(
            estimate(collective, name, size, nbytes, NATIVE_LINK) for name in names
        )
    return Choice(min(seconds, key=lambda name: seconds[name]), seconds)


def bucket_of(nbytes: int) -> int:
    """The size class that is priced for a call: the next power of two."""
    return 1 << max(nbytes - 1, 0).bit_length()
