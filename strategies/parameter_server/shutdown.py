"""How a process leaves the others behind: by itself, with an exception, or after somebody's death.

Other ranks don't wait for a worker, so one that fails ends alone: its traceback is shown, the
servers learn that it left, the others run on.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from functools import lru_cache
from typing import Protocol

from collectives.consistency.uncaught import end_alone
from collectives.lifecycle import shutdown
from collectives.messaging.mailbox import Mailbox


class Leaver(Protocol):
    """Who must say goodbye."""

    def leave(self) -> None:
        """Say it; where it was said already do nothing."""


@lru_cache(maxsize=1)
def _exit_code() -> shutdown.ExitCode:
    return shutdown.ExitCode(sys.excepthook)


def leave_at_exit(leaver: Leaver) -> None:
    """Let it say goodbye when the program ends; an uncaught exception ends this process alone."""
    end_alone()
    reference = weakref.ref(leaver)

    def leave() -> None:
        alive = reference()
        if alive is not None:
            alive.leave()

    atexit.register(leave)


def survive_deaths(mailbox: Mailbox) -> None:
    """End this process at its end even if another one of the mailbox has died."""
    code = _exit_code()

    def end_without_mpi() -> None:
        if all(mailbox.alive(rank) for rank in range(mailbox.size)):
            return
        # MPI_Finalize, and with MPICH even calls between the living, may wait for the dead one for
        # ever, holding Python's lock.
        code.end_process()

    shutdown.before_closing(end_without_mpi)
