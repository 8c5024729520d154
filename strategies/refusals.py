"""What one rank alone is refused, before it has sent anything, is refused on all of them."""

from __future__ import annotations

from types import TracebackType

from collectives import Communicator
from collectives.uncaught import raised_on_all


class RefusedTogether:
    """A context for checks that come before a collective call, which the other ranks make.

    Where a check raises an ordinary error (TypeError, ValueError, …) on this rank, the rank meets
    the others in another call than theirs, so that none of them waits for it: all raise the same
    MismatchError, in which this rank's own error stands. Where all ranks raise the same,
    it is raised as it is. Without an error it costs nothing: what the call is, the parts of its
    name, is only then put into words. communicator None: checks by oneself.
    """

    __slots__ = ("_communicator", "_what")

    def __init__(self, communicator: Communicator | None, *what: object) -> None:
        self._communicator, self._what = communicator, what

    def __enter__(self) -> None:
        """Begin the checks."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tell the others, except of what all ranks have alike.

        Such are the errors of collectives, and those of the wrong context: RuntimeErrors.
        """
        shared = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        if self._communicator is not None and isinstance(error, Exception) and not shared:
            name = ".".join(map(str, self._what))
            self._communicator.barrier(f"{name} refused by {type(error).__name__}: {error}")
            raised_on_all(error, self._communicator.rank)
