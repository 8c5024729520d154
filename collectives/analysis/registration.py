"""Registration of algorithms from outside of the package: of those that the verifier accepts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.analysis.verify import verify_schedule
from collectives.errors import ScheduleError
from collectives.schedules.schedule import Schedule, Step, chunk_per_rank
from collectives.schedules.spec import spec_of

# Below a second for the schedules of this package. `verify` proves any other size.
_SIZES = range(1, 33)


def register_algorithm(
    collective: str,
    name: str,
    schedule: Schedule,
    *,
    chunks: Callable[[int], int] = chunk_per_rank,
) -> None:
    """Register a schedule, so that it can be verified, priced, selected, forced and benchmarked.

    It is verified for 1 to 32 ranks first. `chunks` maps the number of ranks to the number of
    chunks of the buffer. It applies where the collective leaves that open (all_reduce, reduce,
    broadcast). Every rank must register the same schedules, before the first call that could use
    them: calls that name schedules which differ for 1 to 32 ranks are a MismatchError.

    Raises ScheduleError where the schedule breaks its collective's condition; ValueError for an
    unknown collective, a name in use, and a schedule or `chunks` that fails or gives no such thing;
    TypeError for a name that is not a string and for what is not callable.
    """
    algorithm = algorithms.new_algorithm(collective, name, schedule, chunks)
    digest = hashlib.blake2b(digest_size=4)
    for size in _SIZES:
        _prove(algorithm, size, digest)
    algorithms.add(replace(algorithm, digest=digest.hexdigest()))


def _prove(algorithm: algorithms.Algorithm, size: int, digest: Any) -> None:
    """Add it to the digest; ScheduleError or ValueError if it is wrong for so many ranks."""
    where = f"{size} rank{'s' * (size > 1)}"
    try:
        count = algorithm.chunks(size)
        if count < 1:
            raise ValueError(f"chunks gave {count!r}: must be at least 1")
        rounds = list(algorithm.schedule(np.arange(size), size))
        verify_schedule(spec_of(algorithm.collective), rounds, size, count)
        digest.update(
            repr((count, [[_plain(step, size) for step in each] for each in rounds])).encode()
        )
    except ScheduleError as error:
        error.args = (f"on {where}: {error.args[0]}",)
        raise
    except Exception as error:
        raise ValueError(
            f"algorithm {algorithm.name!r} of {algorithm.collective} on {where}:"
            f" {type(error).__name__}: {error}. A schedule is a function (rank, size) that yields"
            " lists of steps. It is made of arithmetic alone, with `when=` in place of `if`: it"
            " runs for one rank (an int), and for all ranks at once (numpy.arange)"
        ) from error


def _plain(step: Step, size: int) -> tuple[Any, ...]:
    """The step of every rank, as lists."""
    fields = (step.chunk, step.peer, step.count, step.when)
    return type(step).__name__, *(np.broadcast_to(each, size).tolist() for each in fields)
