"""Initialization of MPI, and the communicator of all ranks."""

from __future__ import annotations

import os

from collectives.communicator import Communicator
from collectives.consistency.uncaught import end_the_job_on_exceptions
from collectives.lifecycle.setup import check_backend, check_launch, start_mpi
from collectives.waiting.wait_policy import DEFAULT_DEADLINE, check_deadline


class _Unset:
    """Type of the default of an argument for which None has a meaning."""


_UNSET = _Unset()

_world: Communicator | None = None


def world(*, backend: str = "auto", deadline: float | _Unset | None = _UNSET) -> Communicator:
    """The communicator of all ranks. The first call initializes MPI; later calls return the same.

    A program started without `mpirun` is a world of one rank. From then on, an uncaught exception
    on one rank prints its traceback and ends the whole job.

    Args:
        backend: how arrays on GPUs are moved, as of `Communicator`.
        deadline: how many seconds a call waits for absent ranks (default 300; None waits for ever).
            A later call with a deadline changes it.

    Raises:
        BackendUnavailableError: MPI is missing, or NCCL where it is requested.
        LaunchError: a launcher started several processes and MPI has one rank
            (COLLECTIVES_ALLOW_SINGLETON=1 permits it).
        ValueError: the backend is unknown, or not that of the first call.
        TypeError: the deadline is not a number.

    """
    global _world
    if _world is None or _world.closed:
        mpi = start_mpi()
        check_launch(mpi, os.environ)
        if mpi.COMM_WORLD.size > 1:
            end_the_job_on_exceptions(mpi)
        # Wrong arguments of one rank are raised on all ranks, which wait for each other.
        seconds = DEFAULT_DEADLINE if isinstance(deadline, _Unset) else deadline
        _world = Communicator(mpi.COMM_WORLD, backend=backend, deadline=seconds)
        return _world
    check_backend(backend)
    if backend not in ("auto", _world.backend):
        raise ValueError(f"backend={backend!r}: the world was made with {_world.backend!r}")
    if not isinstance(deadline, _Unset):
        _world.deadline = check_deadline(deadline)
    return _world
