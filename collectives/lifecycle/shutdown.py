"""The end of the program: of its communicators, of its process, and in a forked child process."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from multiprocessing.util import Finalize
from typing import Any, NoReturn, Protocol

from collectives.consistency.uncaught import end_alone
from collectives.lifecycle.failures import failures
from collectives.lifecycle.futures import complete_all
from collectives.waiting.wait_policy import log

_UNSENT = "messages that other ranks have not received when this rank ends are lost"

# Ranks that end in step synchronize at once. A rank that ends alone cycles through its
# communicators, because it can't know in which one the others wait for it. After some of them it
# comes back to the first one, in which ranks that end out of step find each other.
_FIRST_TURN = 1.0
_ROUND_SECONDS = 0.4
_SHORTEST_TURN = 0.02
_MOST_IN_ROUND = 16

# Open MPI's mpirun sets it to 1 for --with-ft ulfm.
_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"

# multiprocessing's own finalizers have priorities of -5 and above.
_AFTER_OTHERS = -100


class Closable(Protocol):
    """The part of a communicator that is used here."""

    @property
    def deadline(self) -> float | None:
        """Seconds that it may wait for the other ranks."""

    @property
    def lost_rank(self) -> bool:
        """Whether a rank of it has died."""

    @property
    def unsent(self) -> bool:
        """Whether messages are still on their way."""

    def finish(self) -> None:
        """Run the actions that other ranks may still wait for."""

    def close_at_exit(self, seconds: float) -> bool:
        """Close it; False if the other ranks did not do so within that time."""

    def forbid(self) -> None:
        """Refuse every call from now on."""


_lock = threading.Lock()
_open: dict[int, Closable] = {}
_handled: BaseException | None = None
"""The exception in whose handler this process was forked."""
_was_open = False
"""Whether this process has had any, even if all are closed."""
_before: list[Callable[[], None]] = []
"""What runs at the program's end, before every attempt to close, and before MPI ends."""


def keep(group: Closable) -> None:
    """Close the communicator when the program ends."""
    global _was_open
    with _lock:
        _was_open = True
        if not _open:
            _close_in_forked_rank(os.getpid())
            if _outlives_ranks():
                exit_code()
        _open[id(group)] = group


def forget(group: Closable) -> None:
    """Remove a communicator that was closed."""
    with _lock:
        _open.pop(id(group), None)


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

    def _show_error(self, *error: Any) -> None:
        self.code = 1
        self._show(*error)

    def end_process(self) -> NoReturn:
        """End at once with this code: no exit handler runs, MPI is not finalized."""
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            # It may be closed or broken, or None.
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(self.code & 0xFF)


@lru_cache(maxsize=1)
def exit_code() -> ExitCode:
    """The one of this process; uncaught exceptions are shown as before."""
    return ExitCode(sys.excepthook)


def end_by(reasons: Iterable[str | None]) -> None:
    """End this process without MPI if there is a reason; the launcher then ends the others.

    Ranks to which this one can say nothing more would wait for it for ever.
    """
    reason = next(filter(None, reasons), None)
    if reason is not None:
        log.error("%s: this process ends without MPI", reason)
        code = exit_code()
        code.code = code.code or 1
        code.end_process()


def survive_deaths(all_alive: Callable[[], bool]) -> None:
    """End this process at its end even if a rank has died: then `all_alive()` is false."""
    code = exit_code()

    def end_without_mpi() -> None:
        # MPI_Finalize, and with MPICH even calls between the living, may wait for the dead one for
        # ever, holding Python's lock.
        if not all_alive():
            code.end_process()

    _before.append(end_without_mpi)


def leave_at_exit(leave: Callable[[], None]) -> None:
    """Call a method at exit if its object lives; an uncaught exception ends this process alone."""
    end_alone()
    reference = weakref.WeakMethod(leave)

    def leave_if_alive() -> None:
        alive = reference()
        if alive is not None:
            alive()

    atexit.register(leave_if_alive)


def _outlives_ranks() -> bool:
    """Whether the launcher lets the other ranks live when one has died: that of ULFM."""
    return os.environ.get(_FAULT_TOLERANCE, "0") != "0"


def _prepare() -> None:
    for action in _before:
        action()


@atexit.register
def _close_all() -> None:
    """Close the communicators that the program left open, in an order common to all ranks.

    A rank that ends while others wait for it in a call ends their wait: the mismatch names their
    call, and this rank's exit.
    """
    every = list(reversed(_open.values()))
    start, groups, seconds = time.monotonic(), every, _FIRST_TURN
    due: list[Closable] = []
    tried: set[int] = set()
    while groups:
        _prepare()
        first, *others = groups
        if first.close_at_exit(seconds):
            # The ranks are in step.
            groups, seconds = others, _FIRST_TURN
            continue
        begun = time.monotonic()
        # Each of the others in turn, over several rounds.
        due = [group for group in due if group in others] or others
        now, due = due[:_MOST_IN_ROUND], due[_MOST_IN_ROUND:]
        tried.update(map(id, (first, *now)))
        in_step = False
        for group in now:
            seconds = _FIRST_TURN if in_step else _turn(_ROUND_SECONDS / len(groups))
            in_step = group.close_at_exit(seconds)
            if in_step:
                groups = [each for each in groups if each is not group]
        groups = _within_deadline(groups, time.monotonic() - start, tried)
        # At least as long in the first one as in the others.
        seconds = _turn(max(_ROUND_SECONDS, time.monotonic() - begun))
    complete_all()
    _prepare()
    if _outlives_ranks() and any(each.lost_rank for each in every):
        # MPI_Finalize of Open MPI 5.0 waits for ever in one of a few runs.
        exit_code().end_process()


def _within_deadline(groups: list[Closable], waited: float, tried: set[int]) -> list[Closable]:
    """Those that are tried again. The others are given up, each after it was tried once."""
    left = []
    for group in groups:
        if group.deadline is None or waited < group.deadline or id(group) not in tried:
            left.append(group)
        elif group.unsent:
            log.warning("%r: %s", group, _UNSENT)
    return left


def _turn(seconds: float) -> float:
    """About as many seconds.

    Random, because two ranks that cycle in the same rhythm could miss each other for ever.
    """
    return max(_SHORTEST_TURN, seconds * random.uniform(0.5, 1.5))


@atexit.register
def _finish_all() -> None:
    """Run deferred actions before `_close_all`, which also runs if this raises.

    Not after an uncaught exception, which may prevent this rank from doing what others wait for.
    """
    if not hasattr(sys, "last_value"):
        for group in list(reversed(_open.values())):
            group.finish()


@lru_cache(maxsize=1)
def _close_in_forked_rank(pid: int) -> None:
    """Close them at the end of a rank that multiprocessing forked, which runs no exit handlers.

    Once in each process.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_start_method", None) in ("fork", "forkserver"):
        Finalize(None, _end_forked_rank, exitpriority=_AFTER_OTHERS)


def _end_forked_rank() -> None:
    # multiprocessing ends the process while it handles an exception that nothing has caught.
    error = sys.exc_info()[1]
    if error is None or error is _handled or isinstance(error, SystemExit):
        _finish_all()
    _close_all()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _begin_child() -> None:
    """A child process is no rank, and must not finalize MPI, as mpi4py would at exit."""
    global _lock, _handled
    _lock, _handled = threading.Lock(), sys.exc_info()[1]
    failures.forget()
    if not _was_open:
        return
    for group in list(_open.values()):
        group.forbid()
    _open.clear()
    _before.clear()
    # The parent's hook for exceptions would end the whole job.
    atexit.register(ExitCode(sys.__excepthook__).end_process)


os.register_at_fork(after_in_child=_begin_child)
