"""Exceptions that one rank sends to another, with the traceback of where they were raised."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import NamedTuple

from collectives.errors import pickled, summary_of


class RemoteError(RuntimeError):
    """Another rank raised an exception that can't be sent; the text is that exception's own."""


class RemoteTracebackError(Exception):
    """Where on another rank an exception was raised: the cause of the one raised here."""

    def __init__(self, place: str, text: str) -> None:
        """`place` names the task and its rank, `text` is the traceback there."""
        super().__init__(place, text)
        self.place, self.text = place, text

    def __str__(self) -> str:
        return f"on {self.place}:\n{self.text}"


class Failure(NamedTuple):
    """An exception in a form that can be sent."""

    pickled: bytes | None
    """None for an exception that pickle can't restore."""
    summary: str
    place: str
    traceback: str


def describe(
    error: BaseException, place: str, dumps: Callable[[BaseException], bytes] = pickle.dumps
) -> Failure:
    """The exception as it can be sent; `place` names this rank, or the object that failed."""
    text = "".join(traceback.format_exception(error))
    return Failure(pickled(error, dumps), summary_of(error), place, text)


def rebuild(failure: Failure) -> BaseException:
    """The exception, of its own class where possible, with its place and traceback as its cause."""
    error = _unpickled(failure.pickled)
    if error is None:
        error = RemoteError(failure.summary)
    error.__cause__ = RemoteTracebackError(failure.place, failure.traceback)
    return error


def _unpickled(content: bytes | None) -> BaseException | None:
    try:
        error = None if content is None else pickle.loads(content)
    except Exception:  # a class that only the sender has
        return None
    return error if isinstance(error, BaseException) else None
