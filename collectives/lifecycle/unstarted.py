"""The end of the job by an exception that no one catches before MPI starts.

MPICH's mpirun ends the other ranks when one ends that has opened PMI, not when one ends before:
they would wait in MPI_Init for ever. `init` is PMI-1's first message, otherwise sent by MPI_Init.
"""

from __future__ import annotations

import atexit
import os
import sys
from select import select
from types import TracebackType

from collectives.consistency.uncaught import drain_output
from collectives.launching.launcher import started_by_mpi
from collectives.launching.library import is_initialized

# mpirun may have ended, or another process may have read the answer.
_ANSWER_SECONDS = 5.0
_INIT = b"cmd=init pmi_version=1 pmi_subversion=1\n"

_earlier_hook = sys.excepthook
_rank = os.getpid()


def end_the_unstarted_job_on_exceptions() -> None:
    """From now on, until MPI starts, a process of MPICH's mpirun that fails ends the job."""
    global _earlier_hook
    if os.environ.get("PMI_FD", "").isdigit() and started_by_mpi(os.environ):
        _earlier_hook = sys.excepthook
        sys.excepthook = _show_and_end


def leave_exceptions_to_mpi() -> None:
    """Undo it once MPI has started. A hook that has been installed since stays."""
    if sys.excepthook is _show_and_end:
        sys.excepthook = _earlier_hook


def _show_and_end(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _earlier_hook(kind, error, trace)
    # The program goes on after the hook where it is interactive, and may start MPI.
    atexit.register(_open_pmi)


def _open_pmi() -> None:
    forked = os.getpid() != _rank
    if not forked and not is_initialized() and started_by_mpi(os.environ):
        drain_output()
        pmi = int(os.environ["PMI_FD"])
        os.write(pmi, _INIT)
        # A later program of the same shell would read what is left of the answer.
        while select([pmi], [], [], _ANSWER_SECONDS)[0] and os.read(pmi, 1) not in (b"\n", b""):
            continue
