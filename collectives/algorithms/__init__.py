"""Table of algorithms: the schedules that implement each collective, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    digest: str = ""
    """Of the schedule, which every rank registers for itself; of this package all have the same."""


_DEFAULT = "auto"
"""What the benchmark calls the default selection."""

_TABLE: dict[tuple[str, str], Algorithm] = {}
_NAMES: dict[str, list[str]] = {}


def register(*arguments: Any, **named: Any) -> None:
    """Add an algorithm of this package, of the arguments of `new_algorithm`.

    Tests verify it. `analysis.registration` verifies those of users.
    """
    add(new_algorithm(*arguments, **named))


def new_algorithm(
    collective: str, name: str, schedule: Schedule, chunks: Callable[[int], int] = chunk_per_rank
) -> Algorithm:
    """An algorithm for `add`.

    `chunks` maps the number of ranks to the number of chunks of the buffer. It applies where the
    collective leaves that open (all_reduce, reduce, broadcast).

    Raises ValueError for an unknown collective or a name in use, TypeError for a name that is not a
    string, and for a schedule or `chunks` that is not callable.
    """
    if not isinstance(name, str) or not callable(schedule):
        raise TypeError(f"name={name!r}, schedule={schedule!r}: must be a string and a callable")
    if not callable(chunks):
        raise TypeError(f"chunks={chunks!r}: must be a function of the number of ranks")
    chunks = spec_of(collective).chunks or chunks
    if (collective, name) in _TABLE or name in (*FORCED, _DEFAULT):
        raise ValueError(f"name={name!r}: {collective} already has an algorithm of that name")
    return Algorithm(collective, name, schedule, chunks)


def add(algorithm: Algorithm) -> None:
    """Put it into the table, so that it can be verified, priced, selected, forced and measured."""
    _TABLE[algorithm.collective, algorithm.name] = algorithm
    _NAMES.setdefault(algorithm.collective, []).append(algorithm.name)


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


def forced(collective: str, name: str | None) -> str | None:
    """The argument that names an algorithm or path, as text that is equal on all ranks.

    ValueError for one that the collective does not have. None for None.
    """
    if name is None:
        return None
    found = _TABLE.get((collective, name)) if isinstance(name, str) else None
    if found is None and (not isinstance(name, str) or name not in FORCED):
        there = ", ".join(map(repr, [*names(collective), *FORCED]))
        raise ValueError(f"algorithm={name!r}: {collective} has {there}")
    text = f"algorithm={name}"
    return f"{text}, schedule {found.digest}" if found and found.digest else text


register("all_reduce", "ring", ring.all_reduce)
register("all_reduce", "doubling", doubling.all_reduce, chunks=one_chunk)
register("all_reduce", "rabenseifner", rabenseifner.all_reduce)
register("all_reduce", "circulant", circulant.all_reduce)
register("reduce_scatter", "ring", ring.reduce_scatter)
register("reduce_scatter", "rabenseifner", rabenseifner.reduce_scatter)
register("reduce_scatter", "circulant", circulant.reduce_scatter)
register("all_gather", "ring", ring.all_gather)
register("all_gather", "doubling", doubling.all_gather)
register("scan", "doubling", doubling.scan)
register("exscan", "doubling", doubling.exscan)
register("broadcast", "binomial", binomial.broadcast, chunks=one_chunk)
register("broadcast", "scatter_all_gather", scatter_all_gather.broadcast)
register("reduce", "binomial", binomial.reduce, chunks=one_chunk)
register("reduce", "reduce_scatter_gather", reduce_scatter_gather.reduce)
register("gather", "binomial", binomial.gather)
register("scatter", "binomial", binomial.scatter)
register("all_to_all", "pairwise", pairwise.all_to_all)
