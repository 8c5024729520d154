"""The same error on every rank.

TensorFlow's collectives stay broken for the rest of the process after one rank has failed. Here all
ranks raise an error where one fails, and the next call works. Ranks compare fingerprints of texts,
which costs a barrier; reports are gathered only where the texts differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from collectives import Communicator, DeadlineExceededError, MismatchError
from collectives.consistency.uncaught import is_raised_on_all, raised_on_all
from collectives.errors import UnusableError, portable, summary_of
from collectives.scope import calls_made, has_ended, named_scope

Report = TypeVar("Report")
Result = TypeVar("Result")


def propagate(
    communicator: Communicator | None, error: Exception, calls: int | None, *what: object
) -> None:
    """Raise an error on the other ranks where this one fails before a collective call.

    This rank makes another call than the others, so that all ranks raise the same MismatchError,
    with the error's text. Where all ranks have the same error this returns, and the caller raises
    it. `calls` is `calls_made` before the checks, None for checks without communication. The call's
    name is joined from the parts of `what`. communicator None: no rank waits.
    """
    if communicator is None or _is_shared(error, communicator, calls):
        return
    name = ".".join(map(str, what))
    try:
        communicator.barrier(f"{name} refused by {summary_of(error)}")
    except UnusableError:
        return  # The error itself ended the communicator, and so the others' calls.
    raised_on_all(error, communicator.rank)


class PropagatedErrors:
    """A context for checks before a collective call: `propagate` what they raise."""

    __slots__ = ("_calls", "_communicator", "_what")

    def __init__(self, communicator: Communicator | None, *what: object) -> None:
        self._communicator, self._what = communicator, what

    def __enter__(self) -> None:
        """Begin the checks."""
        self._calls = 0 if self._communicator is None else calls_made(self._communicator)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Propagate an error; interruptions of this rank are not errors of the call."""
        if isinstance(error, Exception):
            propagate(self._communicator, error, self._calls, *self._what)


def _is_shared(error: Exception, communicator: Communicator, calls: int | None) -> bool:
    """Whether all ranks raise the error, or the communicator has ended.

    Those of its calls are shared, of which it has made none if there are as many as before: the
    error is of another communicator, or was raised before. A call that exceeded its deadline isn't
    counted.
    """
    if has_ended(communicator) or isinstance(error, DeadlineExceededError):
        return True
    compared = isinstance(error, MismatchError) and bool(error.calls)
    return (compared or is_raised_on_all(error)) and calls_made(communicator) != calls


def compare(
    communicator: Communicator, kind: str, text: str, report: Report, scope: str | None = None
) -> list[Report] | None:
    """None where the ranks' texts are equal, else every rank's report. Collective.

    `kind` is the prefix of the texts of all ranks that gather such reports, and `scope` the name of
    the gathering call in errors. Raises MismatchError where a rank makes another call.
    """
    try:
        communicator.barrier(kind + text)
    except MismatchError as error:
        return reports_after(error, communicator, kind, report, scope)
    return None


def reports_after(
    error: MismatchError,
    communicator: Communicator,
    kind: str,
    report: Report,
    scope: str | None,
) -> list[Report]:
    """Every rank's report, after calls whose texts differed; else the error is raised. Collective.

    All ranks have to compare the same kind: a rank in another call gathers nothing.
    """
    if not all(kind in call for call in error.calls):
        raise error
    with named_scope(communicator, scope or kind.rstrip(": ")):
        return communicator.all_gather_object(report)


def by_rank(text: str, entries: Iterable[object]) -> str:
    """The text, and a line with each rank's entry."""
    return "\n".join([text, *(f"  rank {rank}: {each}" for rank, each in enumerate(entries))])


def refuse_differences(
    communicator: Communicator, what: str, text: str, call: str | None = None
) -> None:
    """The same ValueError on every rank where the ranks' texts differ. Collective.

    `call` names this call where another rank makes another one, in place of `what`.
    """
    texts = compare(communicator, f"{call or what}: ", text, text)
    if texts is not None:
        raise raised_on_all(ValueError(by_rank(what, texts)), communicator.rank)


Errors = Sequence[Exception | None]
"""The error of each rank, None where it has none."""


def lowest_error(errors: Errors, rank: int) -> Exception:
    """The lowest rank's error, to be raised on all."""
    for shown_by, error in enumerate(errors):
        if error is not None:
            return raised_on_all(error, rank, shown_by)
    raise AssertionError("no rank has an error")


def call_on_all(
    communicator: Communicator,
    what: str,
    action: Callable[[], Result],
    chosen: Callable[[Errors, int], Exception] = lowest_error,
    sent: Callable[[Exception], Exception] = portable,
) -> Result:
    """The action's result on this rank; an error on every rank where it fails on any. Collective.

    `chosen` gives the error that a rank raises, of all ranks' and its own number; the others' are
    as they were `sent`. The action may itself be collective: errors that all ranks have already are
    raised as they are.
    """
    calls = calls_made(communicator)
    try:
        result = action()
    except Exception as error:
        if not _is_shared(error, communicator, calls):
            # Here, so that this rank's error is the context of one that the comparison raises.
            raise_on_all(communicator, what, error, chosen, sent)
        raise
    raise_on_all(communicator, what, None, chosen, sent)
    return result


def raise_on_all(
    communicator: Communicator,
    what: str,
    error: Exception | None,
    chosen: Callable[[Errors, int], Exception] = lowest_error,
    sent: Callable[[Exception], Exception] = portable,
) -> None:
    """Raise an error on every rank where any rank has one. Collective; see `call_on_all`."""
    text = "done" if error is None else summary_of(error)
    found: Any = compare(communicator, f"{what}: ", text, error and sent(error), what)
    if found is None and error is not None:
        found = [error] * communicator.size
    if found is not None:
        found[communicator.rank] = error
        raised = chosen(found, communicator.rank)
        if raised is error:
            raise error
        raise raised from None


def call_on_first(communicator: Communicator, action: Callable[[], Result]) -> Result:
    """The action's result on rank 0, for every rank; its error likewise. Collective.

    The result should be small: it is pickled. An error that can't be pickled, and what interrupts
    rank 0 (KeyboardInterrupt, SystemExit), is a RuntimeError on the others.
    """
    if communicator.rank:
        result: Result
        result, error = communicator.broadcast_object()
        if error is not None:
            raise raised_on_all(error, communicator.rank)
        return result
    try:
        done = action()
    except Exception as error:
        communicator.broadcast_object((None, portable(error)))
        raised_on_all(error, 0)
        raise
    except BaseException as error:
        text = f"rank 0 was interrupted by {type(error).__name__}"
        communicator.broadcast_object((None, RuntimeError(text)))
        raise
    communicator.broadcast_object((done, None))
    return done
