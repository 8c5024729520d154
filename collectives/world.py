"""Starting MPI, and the communicator of all ranks."""

from __future__ import annotations

import fcntl
import sys
import termios
import time
from types import TracebackType
from typing import Any

from collectives.backends import check_backend, start_mpi
from collectives.communicator import Communicator
from collectives.waiting import DEFAULT_DEADLINE, check_deadline

_LONGEST_HANDOVER = 1.0
_FURTHER_HOP = 0.2


class _Unset:
    """The type of a default that no caller can mean."""


_UNSET = _Unset()

_world: Communicator | None = None
_ends_alone = False


def world(*, backend: str = "auto", deadline: float | _Unset | None = _UNSET) -> Communicator:
    """The communicator of all ranks. MPI starts at the first call; later calls return the same.

    A program started without `mpirun` is a world of one rank. From then on an uncaught exception on
    one rank shows its traceback and ends the whole job. `deadline` is how many seconds a call waits
    for ranks that don't come (default: 300; None: for ever); a later call that gives one sets it.
    `backend` says how arrays on GPUs travel, as that of `Communicator` does. Raises
    BackendUnavailableError where MPI is missing, or NCCL where it is asked for, ValueError for an
    unknown backend, or for another one than that of the first call.
    """
    global _world
    if _world is None or _world.closed:
        mpi = start_mpi()
        # What is wrong on one rank is raised on all: they are waiting for each other.
        seconds = DEFAULT_DEADLINE if isinstance(deadline, _Unset) else deadline
        _world = Communicator(mpi.COMM_WORLD, backend=backend, deadline=seconds)
        if _world.size > 1:
            _end_the_job_on_exceptions(mpi)
        return _world
    check_backend(backend)
    if backend not in ("auto", _world.backend):
        raise ValueError(f"backend={backend!r}: the world was made with {_world.backend!r}")
    if not isinstance(deadline, _Unset):
        _world.deadline = check_deadline(deadline)
    return _world


def end_alone() -> None:
    """From now on an uncaught exception on this rank ends no other one.

    Its traceback is shown and its exit code is 1, as in any program. It is for ranks that no other
    one waits for, or whose end the others learn of in another way.
    """
    global _ends_alone
    _ends_alone = True


def _end_the_job_on_exceptions(mpi: Any) -> None:
    """Abort after an uncaught exception, since the other ranks would wait for this one for ever.

    mpi4py's runner (`python -m mpi4py`) does the same for programs started through it.
    """
    show = sys.excepthook

    def show_and_abort(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if _ends_alone:
            show(kind, error, trace)
            return
        try:
            show(kind, error, trace)
            _hand_over_output()
        finally:
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = show_and_abort


def _hand_over_output() -> None:
    """Let mpirun read what was written, since it forwards nothing more once a rank aborts."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    limit = time.monotonic() + _LONGEST_HANDOVER
    while _unread_bytes(sys.stderr) and time.monotonic() < limit:
        time.sleep(0.001)
    # From the process beside this one to mpirun it is a further hop, of which nothing can be seen.
    time.sleep(_FURTHER_HOP)


def _unread_bytes(stream: Any) -> int:
    """How much of a pipe's content the other end has not read yet; 0 for what is no pipe."""
    try:
        count = fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4))
    except (OSError, ValueError):
        return 0
    return int.from_bytes(count, sys.byteorder)
