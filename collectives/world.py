"""Starting MPI, and the communicator of all ranks."""

from __future__ import annotations

import os

from collectives.communicator import Communicator
from collectives.consistency.uncaught import end_the_job_on_exceptions
from collectives.lifecycle.launcher import check_launch
from collectives.lifecycle.setup import check_backend, start_mpi
from collectives.waiting.wait_policy import DEFAULT_DEADLINE, check_deadline


class _Unset:
    """The type of a default that no caller can mean."""


_UNSET = _Unset()

_world: Communicator | None = None


def world(*, backend: str = "auto", deadline: float | _Unset | None = _UNSET) -> Communicator:
    """The communicator of all ranks. MPI starts at the first call; later calls return the same.

    A program started without `mpirun` is a world of one rank. From then on an uncaught exception on
    one rank shows its traceback and ends the whole job. `deadline` is how many seconds a call waits
    for ranks that don't come (default: 300; None: for ever); a later call that gives one sets it.
    `backend` says how arrays on GPUs travel, as that of `Communicator` does. Raises
    BackendUnavailableError where MPI is missing, or NCCL where it is asked for, ValueError for an
    unknown backend, or for another one than that of the first call, LaunchError where a launcher
    started several processes and MPI sees one alone (COLLECTIVES_ALLOW_SINGLETON=1 allows it).
    """
    global _world
    if _world is None or _world.closed:
        mpi = start_mpi()
        check_launch(mpi, os.environ)
        if mpi.COMM_WORLD.size > 1:
            end_the_job_on_exceptions(mpi)
        # What is wrong on one rank is raised on all: they are waiting for each other.
        seconds = DEFAULT_DEADLINE if isinstance(deadline, _Unset) else deadline
        _world = Communicator(mpi.COMM_WORLD, backend=backend, deadline=seconds)
        return _world
    check_backend(backend)
    if backend not in ("auto", _world.backend):
        raise ValueError(f"backend={backend!r}: the world was made with {_world.backend!r}")
    if not isinstance(deadline, _Unset):
        _world.deadline = check_deadline(deadline)
    return _world
