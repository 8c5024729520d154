"""Uncaught exceptions: which rank prints the traceback, and the end of the job."""

from __future__ import annotations

import fcntl
import io
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from types import TracebackType
from typing import Any

from collectives.errors import (
    CollectiveError,
    DeadlineExceededError,
    Error,
    RankFailedError,
    in_step,
    is_in_step,
    summary_of,
)
from collectives.waiting.last_resort import abort
from collectives.waiting.wait_policy import is_inside

# How long a rank waits for another rank to print the traceback and end the job. That rank may have
# caught the error.
_LONGEST_TRUST = 5.0
_LONGEST_HANDOVER = 1.0
_FURTHER_HOP = 0.2

# Whatever the program has put in place of sys.stderr.
_STANDARD_ERROR = 2

_SHOWN_BY = "_collectives_shown_by"

_ends_alone = False
_ends_the_job = False
_reports: list[Callable[[], None]] = []


def raised_on_all(error: Error, rank: int, shown_by: int = 0) -> Error:
    """Mark an error that every rank of a communicator raises; `rank` is this rank's number.

    If no rank catches it, only `shown_by` prints the traceback, the others one line each. If all
    ranks catch it, they may continue, because they are in step.
    """
    return in_step(shown_by_one(error, rank, shown_by))


def is_raised_on_all(error: BaseException) -> bool:
    """Whether `raised_on_all` marked the error."""
    return is_in_step(error) and hasattr(error, _SHOWN_BY)


def shown_by_one(error: Error, rank: int, shown_by: int = 0) -> Error:
    """Mark an error that all ranks raise if they run the same program, which is not compared."""
    setattr(error, _SHOWN_BY, None if rank == shown_by else shown_by)
    return error


@contextmanager
def raising_on_all(rank: int) -> Iterator[None]:
    """Mark exceptions that leave the block so that rank 0 prints the traceback.

    For checks of data gathered from all ranks, which end alike on all of them.
    """
    try:
        yield
    except (DeadlineExceededError, RankFailedError):
        raise  # raised only on the ranks that waited
    except Exception as error:
        # Not marked as in step: the exception may come from a signal handler.
        shown_by_one(error, rank)
        raise


def end_alone() -> None:
    """From now on an uncaught exception on this rank ends this process only.

    Its traceback is printed and its exit code is 1, as in any program. For ranks that no other rank
    waits for, or whose end the others detect in another way.
    """
    global _ends_alone
    _ends_alone = True


def report_before(report: Callable[[], None]) -> None:
    """Call this before an uncaught exception ends the job, which runs no exit handlers."""
    _reports.append(report)


def end_the_job_on_exceptions(mpi: Any) -> None:
    """Abort the job after an uncaught exception, because the other ranks would wait for ever.

    mpi4py's runner (`python -m mpi4py`) aborts as well, but only after this hook has run. A second
    call does nothing.
    """
    global _ends_the_job
    if _ends_the_job:
        return
    _ends_the_job = True
    show = _show_in_one_piece if sys.excepthook is sys.__excepthook__ else sys.excepthook

    def show_and_abort(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if _ends_alone or mpi.Is_finalized():
            show(kind, error, trace)
            return
        rank = mpi.COMM_WORLD.rank
        try:
            # torch's hook calls this one, and would print what it has collected afterwards.
            collected = isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None
            if collected:
                sys.stderr = sys.__stderr__
            _report()
            _defer_to_other_rank(error, rank)
            with _prefixing(f"[rank{rank}]: ") if collected else nullcontext():
                show(kind, error, trace)
            drain_output()
        finally:
            abort(mpi.COMM_WORLD)

    sys.excepthook = show_and_abort


@contextmanager
def _prefixing(prefix: str) -> Iterator[None]:
    """Begin each line that is printed to standard error in the block as torch's hook does."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
    finally:
        lines = printed.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(prefix + line if line.strip() else line for line in lines))
        sys.stderr.flush()


def _report() -> None:
    try:
        for report in _reports:
            report()
    except Exception:
        # Of a program's log handler: its own error is still to be shown.
        traceback.print_exc()


def _defer_to_other_rank(error: BaseException, rank: int) -> None:
    """If another rank prints the same traceback, print one line and wait for it to end the job.

    Returns at once if this rank prints the traceback, and later if no rank ended the job.
    """
    shown_by = getattr(error, _SHOWN_BY, None)
    if shown_by is None or _has_cause_of_its_own(error):
        return
    first_line = summary_of(error).partition("\n")[0]
    sys.stderr.write(
        f"rank {rank}: {first_line}"
        f" (raised on all ranks: rank {shown_by} of the communicator shows the traceback)\n"
    )
    sys.stderr.flush()
    time.sleep(_LONGEST_TRUST)


def _has_cause_of_its_own(error: BaseException) -> bool:
    """Whether the traceback would show another error, which the other ranks may not have."""
    if error.__cause__ is not None:
        return True
    return error.__context__ is not None and not error.__suppress_context__


def _show_in_one_piece(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback in a single write, because launchers mix the writes of several ranks.

    That of a CollectiveError, whose text says what happened, ends at the program's line.
    """
    report = traceback.TracebackException(kind, error, trace)
    if isinstance(error, CollectiveError):
        inside = [is_inside(frame) for frame, _ in traceback.walk_tb(trace)]
        # Not where sys.tracebacklimit has shortened it.
        while len(report.stack) == len(inside) and inside[-1] and not all(inside):
            inside.pop()
            report.stack.pop()
    sys.stderr.write("".join(report.format()))


def drain_output() -> None:
    """Let mpirun read the output, because it forwards nothing more once a rank aborts."""
    for stream in (sys.stdout, sys.stderr):
        # What a program has put there instead may have no such method, or be closed.
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    limit = time.monotonic() + _LONGEST_HANDOVER
    while _unread_bytes() and time.monotonic() < limit:
        time.sleep(0.001)
    # There is a further hop from the local process manager to mpirun, which can't be observed.
    time.sleep(_FURTHER_HOP)


def _unread_bytes() -> int:
    """Bytes of standard error that mpirun has not read yet; 0 if it is not a pipe."""
    try:
        count = fcntl.ioctl(_STANDARD_ERROR, termios.FIONREAD, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(count, sys.byteorder)
