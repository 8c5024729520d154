"""The errors that collectives raise.

CollectiveError(RuntimeError)
├── MismatchError                 the ranks did not call the same thing
│   ├── CollectiveMismatchError
│   ├── ShapeMismatchError
│   ├── DtypeMismatchError
│   ├── OpMismatchError
│   └── RootMismatchError
├── DeadlineExceededError         (also a TimeoutError) some ranks did not come in time
├── RankFailedError               a peer died, or an exception ended a call of it
├── LaunchError                   the launcher doesn't serve this MPI: n worlds of one rank
├── BackendUnavailableError       no MPI, no GPU, no NCCL: the message says what to install
└── ScheduleError                 an algorithm does not do what its collective promises

What one rank can see by itself (a root out of range, a dtype that cannot be reduced) is an
ordinary ValueError or TypeError, raised before any message is sent.
"""

from __future__ import annotations

from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)

_IN_STEP = "_collectives_in_step"


def in_step(error: Error) -> Error:
    """Mark an error that leaves the ranks at the same point of the same call; return it.

    Either every rank raises it there, or all data of the call have moved. Any other exception that
    leaves a call which the other ranks may have seen ends the communicator.
    """
    setattr(error, _IN_STEP, True)
    return error


def is_in_step(error: BaseException) -> bool:
    """Whether the error is marked so."""
    return hasattr(error, _IN_STEP)


class CollectiveError(RuntimeError):
    """Base of everything that this package raises beyond ValueError and TypeError."""


class MismatchError(CollectiveError):
    """The ranks did not call the same thing.

    `calls` holds what each rank called, in rank order; the same error is raised on every rank.
    """

    def __init__(self, message: str, calls: tuple[str, ...] = ()) -> None:
        """Append every rank's call to `message`."""
        lines = (f"  rank {rank}: {call}" for rank, call in enumerate(calls))
        super().__init__("\n".join([message, *lines]))
        self.calls = calls


class CollectiveMismatchError(MismatchError):
    """One rank called another collective than its peers."""


class ShapeMismatchError(MismatchError):
    """The ranks' arrays differ in shape where they must not."""


class DtypeMismatchError(MismatchError):
    """The ranks' arrays differ in dtype."""


class OpMismatchError(MismatchError):
    """The ranks asked for different reductions."""


class RootMismatchError(MismatchError):
    """The ranks named different roots."""


class DeadlineExceededError(CollectiveError, TimeoutError):
    """Some ranks did not come before the deadline; `absent` holds those that are known."""

    def __init__(self, message: str, absent: tuple[int, ...] = ()) -> None:
        """`message` names the call, the ranks and the line that waited."""
        super().__init__(message)
        self.absent = absent
        self.withdrawn = False
        """Whether the call counts as not made, so that this rank may make it again, or another."""


class RankFailedError(CollectiveError):
    """A peer died, or an exception ended its thread or one of its calls."""


class UnusableError(RuntimeError):
    """The communicator is closed or can't go on: no call was begun. No part of the interface."""


class LaunchError(CollectiveError):
    """The launcher started several processes, but MPI sees one; the message says what to type."""


class BackendUnavailableError(CollectiveError):
    """What was asked for is not installed or not present; the message says what to install."""


class ScheduleError(CollectiveError):
    """A schedule breaks a rule or does not reach its collective's condition."""

    def __init__(self, problem: str, *, round: int, rank: int, chunk: int) -> None:
        """Name the place: the round (from 0; the last one plus 1 = at the end), rank and chunk."""
        super().__init__(f"round {round}, rank {rank}, chunk {chunk}: {problem}")
        self.round, self.rank, self.chunk = round, rank, chunk
