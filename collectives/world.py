"""Initialization of MPI, and the communicator of all ranks."""

from __future__ import annotations

import os
from typing import Any

from collectives.communicator import Communicator
from collectives.consistency.uncaught import end_the_job_on_exceptions
from collectives.launching.launcher import check_launch
from collectives.launching.start import start_mpi
from collectives.lifecycle.setup import check_backend
from collectives.lifecycle.unstarted import (
    end_the_unstarted_job_on_exceptions,
    leave_exceptions_to_mpi,
)
from collectives.waiting.wait_policy import DEFAULT_DEADLINE, check_deadline


class _Unset:
    """Type of the default of an argument for which None has a meaning."""


_UNSET = _Unset()

# Clocks of torch's stores overflow beyond some centuries.
_FOREVER = 365 * 86400.0

_world: Communicator | None = None

end_the_unstarted_job_on_exceptions()


def world(*, backend: str = "auto", deadline: float | _Unset | None = _UNSET) -> Communicator:
    """The communicator of all ranks. The first call initializes MPI; later calls return the same.

    A program started without a launcher is a world of one rank. Under `torchrun` the ranks find
    each other through torch's store, for which torch is imported. From then on, an uncaught
    exception on one rank prints its traceback and ends the whole job.

    Args:
        backend: how arrays on GPUs are moved, as of `Communicator`.
        deadline: how many seconds a call waits for absent ranks (default 300; None: no limit).
            A later call with a deadline changes it.

    Raises:
        BackendUnavailableError: MPI is missing, or NCCL where it is requested.
        LaunchError: a launcher started several processes and MPI has one rank
            (COLLECTIVES_ALLOW_SINGLETON=1 permits it); torchrun started them, and MPI is not MPICH;
            a rank started this process (the same variable permits it).
        DeadlineExceededError: under torchrun, ranks did not start within the deadline.
        RankFailedError: under torchrun, a rank ended while MPI started.
        ValueError: the backend is unknown, or not that of the first call; the deadline is not
            positive.
        TypeError: the deadline is not a number.

    """
    global _world
    if _world is None or _world.closed:
        seconds = DEFAULT_DEADLINE if isinstance(deadline, _Unset) else deadline
        mpi = start_mpi(_start_seconds(seconds))
        check_launch(mpi, os.environ)
        if mpi.COMM_WORLD.size > 1:
            leave_exceptions_to_mpi()
            end_the_job_on_exceptions(mpi)
        # Wrong arguments of one rank are raised on all ranks, which wait for each other.
        _world = Communicator(mpi.COMM_WORLD, backend=backend, deadline=seconds)
        return _world
    check_backend(backend)
    if backend not in ("auto", _world.backend):
        raise ValueError(f"backend={backend!r}: the world was made with {_world.backend!r}")
    if not isinstance(deadline, _Unset):
        _world.deadline = check_deadline(deadline)
    return _world


def given(comm: Communicator | None) -> Communicator:
    """The communicator; that of all ranks without."""
    return world() if comm is None else comm


def _start_seconds(deadline: Any) -> float:
    """How long the start may take; a wrong deadline is refused after it, on all ranks."""
    try:
        return min(check_deadline(deadline) or _FOREVER, _FOREVER)
    except (TypeError, ValueError):
        return DEFAULT_DEADLINE
