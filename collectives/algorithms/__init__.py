"""The table of algorithms: for each collective, the schedules that implement it, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collectives.algorithms import (
    binomial,
    circulant,
    doubling,
    pairwise,
    rabenseifner,
    reduce_scatter_gather,
    ring,
    scatter_all_gather,
)
from collectives.schedules.paths import FORCED
from collectives.schedules.schedule import Schedule, chunk_per_rank, one_chunk
from collectives.schedules.spec import spec_of


@dataclass(frozen=True)
class Algorithm:
    """A schedule and into how many chunks it cuts the buffer, as a function of the size."""

    collective: str
    name: str
    schedule: Schedule
    chunks: Callable[[int], int]


_TABLE: dict[tuple[str, str], Algorithm] = {}
_NAMES: dict[str, list[str]] = {}


def register_algorithm(
    collective: str,
    name: str,
    schedule: Schedule,
    *,
    chunks: Callable[[int], int] = chunk_per_rank,
) -> None:
    """Add a schedule, so that it can be verified, priced, chosen, forced by name and benchmarked.

    `chunks` says into how many chunks the buffer of `size` ranks is cut; it counts where the
    collective leaves that open (all_reduce, reduce, broadcast). Every rank must register the same.
    Raises ValueError where the collective is unknown or the name is taken, TypeError where the name
    is no text or the schedule no function.
    """
    if not isinstance(name, str) or not callable(schedule):
        raise TypeError(f"name={name!r}, schedule={schedule!r}: must be a text and a function")
    chunks = spec_of(collective).chunks or chunks
    if (collective, name) in _TABLE or name in FORCED:
        raise ValueError(f"name={name!r}: {collective} has an algorithm of that name already")
    _TABLE[collective, name] = Algorithm(collective, name, schedule, chunks)
    _NAMES.setdefault(collective, []).append(name)


def names(collective: str) -> list[str]:
    """The names of the collective's algorithms."""
    return list(_NAMES.get(collective, ()))


def pairs() -> list[tuple[str, str]]:
    """Every (collective, algorithm) there is."""
    return list(_TABLE)


def find(collective: str, name: str) -> Algorithm:
    """The algorithm of that name; ValueError, with the names there are, where there is none."""
    spec_of(collective)
    if (collective, name) not in _TABLE:
        there = ", ".join(map(repr, names(collective)))
        raise ValueError(f"algorithm={name!r}: {collective} has {there}")
    return _TABLE[collective, name]


def check_name(collective: str, name: str | None) -> None:
    """ValueError where the caller asks for a path that the collective doesn't have."""
    if name not in (None, *FORCED) and (collective, name) not in _TABLE:
        there = ", ".join(map(repr, [*names(collective), *FORCED]))
        raise ValueError(f"algorithm={name!r}: {collective} has {there}")


register_algorithm("all_reduce", "ring", ring.all_reduce)
register_algorithm("all_reduce", "doubling", doubling.all_reduce, chunks=one_chunk)
register_algorithm("all_reduce", "rabenseifner", rabenseifner.all_reduce)
register_algorithm("all_reduce", "circulant", circulant.all_reduce)
register_algorithm("reduce_scatter", "ring", ring.reduce_scatter)
register_algorithm("reduce_scatter", "rabenseifner", rabenseifner.reduce_scatter)
register_algorithm("reduce_scatter", "circulant", circulant.reduce_scatter)
register_algorithm("all_gather", "ring", ring.all_gather)
register_algorithm("all_gather", "doubling", doubling.all_gather)
register_algorithm("broadcast", "binomial", binomial.broadcast, chunks=one_chunk)
register_algorithm("broadcast", "scatter_all_gather", scatter_all_gather.broadcast)
register_algorithm("reduce", "binomial", binomial.reduce, chunks=one_chunk)
register_algorithm("reduce", "reduce_scatter_gather", reduce_scatter_gather.reduce)
register_algorithm("gather", "binomial", binomial.gather)
register_algorithm("scatter", "binomial", binomial.scatter)
register_algorithm("all_to_all", "pairwise", pairwise.all_to_all)
