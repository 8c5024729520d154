"""The end of a process that others don't wait for, and its exit code."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn

from collectives.consistency.uncaught import end_alone


class ExitCode:
    """The code that this process ends with, as far as it is known before the end.

    It replaces `sys.exit` and `sys.excepthook`, which calls `show`.
    """

    def __init__(self, show: Callable[..., Any]) -> None:
        self.code = 0
        self._exit, self._show = sys.exit, show
        sys.exit, sys.excepthook = self._exit_with, self._show_error

    def _exit_with(self, status: Any = None, /) -> NoReturn:
        self.code = status if isinstance(status, int) else int(status is not None)
        self._exit(status)

    def _show_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.code = 1
        self._show(kind, error, trace)

    def end_process(self) -> NoReturn:
        """End at once with this code: no exit handler runs, MPI is not finalized."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(self.code & 0xFF)


@lru_cache(maxsize=1)
def exit_code() -> ExitCode:
    """The one of this process; uncaught exceptions are shown as before."""
    return ExitCode(sys.excepthook)


def leave_at_exit(leave: Callable[[], None]) -> None:
    """Call a method at exit if its object lives; an uncaught exception ends this process alone."""
    end_alone()
    reference = weakref.WeakMethod(leave)

    def leave_if_alive() -> None:
        alive = reference()
        if alive is not None:
            alive()

    atexit.register(leave_if_alive)
