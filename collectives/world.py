"""Starting MPI, and the communicator of all ranks."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from collectives.backends import start_mpi
from collectives.communicator import Communicator

_world: Communicator | None = None


def world(*, backend: str = "auto") -> Communicator:
    """The communicator of all ranks. MPI starts at the first call; later calls return the same.

    A program started without `mpirun` is a world of one rank. From then on an uncaught exception on
    one rank shows its traceback and ends the whole job. Raises BackendUnavailableError where MPI is
    missing, ValueError for an unknown backend.
    """
    global _world
    if _world is None or _world.closed:
        mpi = start_mpi()
        _world = Communicator(mpi.COMM_WORLD, backend=backend)
        if _world.size > 1:
            _end_the_job_on_exceptions(mpi)
    return _world


def _end_the_job_on_exceptions(mpi: Any) -> None:
    """Abort after an uncaught exception, since the other ranks would wait for this one for ever.

    mpi4py's runner (`python -m mpi4py`) does the same for programs started through it.
    """
    show = sys.excepthook

    def show_and_abort(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            show(kind, error, trace)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = show_and_abort
