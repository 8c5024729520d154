"""Exceptions that nobody catches: which rank shows the traceback, and the end of the job."""

from __future__ import annotations

import fcntl
import sys
import termios
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from collectives.errors import DeadlineExceededError, RankFailedError, in_step

Error = TypeVar("Error", bound=BaseException)

# How long a rank waits for another one to show the traceback and end the job. That one may have
# caught the error.
_LONGEST_TRUST = 5.0
_LONGEST_HANDOVER = 1.0
_FURTHER_HOP = 0.2

_SHOWN_BY = "_collectives_shown_by"

_ends_alone = False
_ends_the_job = False


def raised_on_all(error: Error, rank: int, shown_by: int = 0) -> Error:
    """Mark an error that every rank of a communicator raises; `rank` is this one's number there.

    Where no rank catches it, `shown_by` alone shows the traceback, the others a line each. Where
    all do, they may go on: it leaves them at the same point of the same call.
    """
    setattr(error, _SHOWN_BY, None if rank == shown_by else shown_by)
    return in_step(error)


@contextmanager
def raising_on_all(rank: int) -> Iterator[None]:
    """Leave the traceback of what leaves the block to rank 0, as `raised_on_all` does.

    For checks of what all ranks have gathered, which end alike on all of them.
    """
    try:
        yield
    except (DeadlineExceededError, RankFailedError):
        raise  # on the ranks that waited
    except Exception as error:
        # An exception of a signal's handler may leave the block as well, out of step.
        setattr(error, _SHOWN_BY, None if rank == 0 else 0)
        raise


def end_alone() -> None:
    """From now on an uncaught exception on this rank ends no other one.

    Its traceback is shown and its exit code is 1, as in any program. It is for ranks that no other
    one waits for, or whose end the others learn of in another way.
    """
    global _ends_alone
    _ends_alone = True


def end_the_job_on_exceptions(mpi: Any) -> None:
    """Abort after an uncaught exception, since the other ranks would wait for this one for ever.

    mpi4py's runner (`python -m mpi4py`) aborts too, but only after this hook has run. A second call
    does nothing.
    """
    global _ends_the_job
    if _ends_the_job:
        return
    _ends_the_job = True
    show = _show_in_one_piece if sys.excepthook is sys.__excepthook__ else sys.excepthook

    def show_and_abort(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if _ends_alone:
            show(kind, error, trace)
            return
        try:
            _leave_to_another(error, mpi.COMM_WORLD.rank)
            show(kind, error, trace)
            _hand_over_output()
        finally:
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = show_and_abort


def _leave_to_another(error: BaseException, rank: int) -> None:
    """Where another rank shows the same traceback, say so, and wait for it to end the job.

    Return at once where it is this rank's to show; and where nobody ended the job.
    """
    shown_by = getattr(error, _SHOWN_BY, None)
    if shown_by is None or _has_cause_of_its_own(error):
        return
    first_line = str(error).partition("\n")[0]
    sys.stderr.write(
        f"rank {rank}: {type(error).__name__}: {first_line}"
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
    """As Python does; launchers mix what several ranks write piecewise."""
    sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))


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
