"""Table of algorithms: the schedules that implement each collective, by name."""

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
    """A schedule, and the number of chunks of its buffer as a function of the size."""

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
    """Register a schedule, so that it can be verified, priced, selected, forced and benchmarked.

    `chunks` maps the number of ranks to the number of chunks of the buffer. It applies where the
    collective leaves that open (all_reduce, reduce, broadcast). Every rank must register the same
    schedules. Raises ValueError for an unknown collective or a name in use, TypeError for a name
    that is not a string or a schedule that is not callable.
    """
    if not isinstance(name, str) or not callable(schedule):
        raise TypeError(f"name={name!r}, schedule={schedule!r}: must be a string and a callable")
    chunks = spec_of(collective).chunks or chunks
    if (collective, name) in _TABLE or name in FORCED:
        raise ValueError(f"name={name!r}: {collective} already has an algorithm of that name")
    _TABLE[collective, name] = Algorithm(collective, name, schedule, chunks)
    _NAMES.setdefault(collective, []).append(name)


def names(collective: str) -> list[str]:
    """The names of the collective's algorithms."""
    return list(_NAMES.get(collective, ()))


def pairs() -> list[tuple[str, str]]:
    """Every registered (collective, algorithm)."""
    return list(_TABLE)


def find(collective: str, name: str) -> Algorithm:
    """The algorithm of that name; ValueError, listing the registered names, if there is none."""
    spec_of(collective)
    if (collective, name) not in _TABLE:
        known = ", ".join(map(repr, names(collective)))
        raise ValueError(f"algorithm={name!r}: {collective} has {known}")
    return _TABLE[collective, name]


def check_name(collective: str, name: str | None) -> None:
    """Raise ValueError for an algorithm or path that the collective does not have."""
    if name not in (None, *FORCED) and (collective, name) not in _TABLE:
        known = ", ".join(map(repr, [*names(collective), *FORCED]))
        raise ValueError(f"algorithm={name!r}: {collective} has {known}")


register_algorithm("all_reduce", "ring", ring.all_reduce)
register_algorithm("all_reduce", "doubling", doubling.all_reduce, chunks=one_chunk)
register_algorithm("all_reduce", "rabenseifner", rabenseifner.all_reduce)
register_algorithm("all_reduce", "circulant", circulant.all_reduce)
register_algorithm("reduce_scatter", "ring", ring.reduce_scatter)
register_algorithm("reduce_scatter", "rabenseifner", rabenseifner.reduce_scatter)
register_algorithm("reduce_scatter", "circulant", circulant.reduce_scatter)
register_algorithm("all_gather", "ring", ring.all_gather)
register_algorithm("all_gather", "doubling", doubling.all_gather)
register_algorithm("scan", "doubling", doubling.scan)
register_algorithm("exscan", "doubling", doubling.exscan)
register_algorithm("broadcast", "binomial", binomial.broadcast, chunks=one_chunk)
register_algorithm("broadcast", "scatter_all_gather", scatter_all_gather.broadcast)
register_algorithm("reduce", "binomial", binomial.reduce, chunks=one_chunk)
register_algorithm("reduce", "reduce_scatter_gather", reduce_scatter_gather.reduce)
register_algorithm("gather", "binomial", binomial.gather)
register_algorithm("scatter", "binomial", binomial.scatter)
register_algorithm("all_to_all", "pairwise", pairwise.all_to_all)
