"""What one rank does for all of them, and what goes wrong on one of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from collectives import CollectiveError, Communicator
from collectives.consistency.uncaught import raised_on_all
from strategies.core.portable_error import portable

Outcome = TypeVar("Outcome")


def done_by_first(communicator: Communicator, action: Callable[[], Outcome]) -> Outcome:
    """What rank 0 gets from the action, on every rank; its error likewise. Collective.

    The outcome should be small: it is pickled. An error that can't be pickled, and what interrupts
    rank 0 (KeyboardInterrupt, SystemExit), is a RuntimeError on the others.
    """
    if communicator.rank:
        outcome, error = communicator.broadcast_object()
        if error is not None:
            raise raised_on_all(error, communicator.rank)
        return outcome  # type: ignore[no-any-return]
    try:
        done = action()
    except BaseException as error:
        communicator.broadcast_object((None, _told(error)))
        raise
    communicator.broadcast_object((done, None))
    return done


def _told(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return portable(error)
    return RuntimeError(f"rank 0 was interrupted by {type(error).__name__}")


def done_by_all(communicator: Communicator, action: Callable[[], Outcome]) -> Outcome:
    """What this rank gets from the action; an error of any rank's on every rank. Collective.

    The action may itself be collective.
    """
    try:
        done = action()
    except CollectiveError:
        raise  # the other ranks know
    except Exception as error:
        raised_everywhere(communicator, error)
        raise
    raised_everywhere(communicator, None)
    return done


def same_everywhere(communicator: Communicator, what: str, names: Sequence[str]) -> None:
    """The same ValueError on every rank where the ranks' names differ. Collective."""
    reports = [set(each) for each in communicator.all_gather_object(list(names))]
    everywhere = set.intersection(*reports)
    extra = [sorted(report - everywhere) for report in reports]
    if any(extra):
        lines = [f"  rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(extra)]
        text = "\n".join([f"{what}: some ranks have states that others lack", *lines])
        raise raised_on_all(ValueError(text), communicator.rank)


def raised_everywhere(communicator: Communicator, error: Exception | None) -> None:
    """Raise the lowest rank's error on every rank. Collective."""
    errors = communicator.all_gather_object(error and portable(error))
    for rank, each in enumerate(errors):
        if each is not None:
            raise raised_on_all(each, communicator.rank, rank)
