"""What one rank alone is refused, before it has sent anything, is refused on all of them."""

from __future__ import annotations

from types import TracebackType

from collectives import BackendUnavailableError, CollectiveError, Communicator
from collectives.consistency.uncaught import raised_on_all
from collectives.errors import UnusableError, in_step, is_in_step


def wrong_context(message: str) -> RuntimeError:
    """The error of a call where it isn't allowed: all ranks run the same program, and raise it."""
    return in_step(RuntimeError(message))


class RefusedTogether:
    """A context for checks that come before a collective call, which the other ranks make.

    Where a check raises an error that this rank alone may have, the rank makes another call than
    the others, so that none of them waits for it: all raise the same MismatchError, which has this
    rank's own error in its text. Where all ranks raise the same, it is raised as it is. Without an
    error it costs nothing: the call's name is joined from its parts only then. communicator None:
    checks of this rank alone.
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
        """Tell the others, except of what all ranks have alike or learn otherwise."""
        if self._communicator is None or not isinstance(error, Exception) or _is_shared(error):
            return
        name = ".".join(map(str, self._what))
        try:
            self._communicator.barrier(f"{name} refused by {type(error).__name__}: {error}")
        except UnusableError:
            return  # The error itself ended the communicator, and so the others' calls.
        raised_on_all(error, self._communicator.rank)


def _is_shared(error: Exception) -> bool:
    """Whether all ranks raise the error, or the others can't be told of it.

    A missing library for GPUs is the only error of collectives that one rank finds by itself.
    """
    if is_in_step(error) or isinstance(error, UnusableError):
        return True
    return isinstance(error, CollectiveError) and not isinstance(error, BackendUnavailableError)
