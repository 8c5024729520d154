"""The end of the job by MPI_Abort, which may wait for ever, or return."""

from __future__ import annotations

import faulthandler
import os
from typing import Any, NoReturn

ABORT_SECONDS = 3.0
"""How long MPI may take before this process ends by itself."""


def abort(comm: Any) -> NoReturn:
    """End the job with the code 1, by an MPI communicator; at least this process ends.

    While a host of the job can't be reached, MPICH's MPI_Abort waits, or returns on that host.
    """
    # The wait holds Python's lock: only this timer's thread needs none. It prints all tracebacks,
    # which the reason that was printed already makes superfluous.
    silent = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True, file=silent)
    comm.Abort(1)
    os._exit(1)
