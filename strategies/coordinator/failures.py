"""Exceptions that go from a worker to the chief."""

from __future__ import annotations

import pickle
import traceback

import cloudpickle  # type: ignore[import-untyped]

from strategies.coordinator.messages import Failure
from strategies.errors import OutOfRangeError, RemoteError, RemoteTracebackError


def describe(error: BaseException) -> Failure:
    """The exception as it can be sent. The end of an iterator is an OutOfRangeError from here on.

    Python gives StopIteration a meaning of its own where it passes.
    """
    text = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}"
    if isinstance(error, StopIteration):
        error = OutOfRangeError("an iterator ended inside a scheduled function")
    return Failure(_pickled(error), summary, text)


def _pickled(error: BaseException) -> bytes | None:
    """None where it can't be read back: pickle doesn't tell before."""
    try:
        packed: bytes = cloudpickle.dumps(error)
        back = pickle.loads(packed)
    except Exception:
        return None
    return packed if type(back) is type(error) else None


def rebuild(failure: Failure, place: str) -> BaseException:
    """The exception, of its own class where that can be, and where it comes from as its cause."""
    error = _own(failure.pickled)
    if error is None:
        error = RemoteError(failure.summary)
    error.__cause__ = RemoteTracebackError(place, failure.traceback)
    return error


def _own(pickled: bytes | None) -> BaseException | None:
    try:
        error = None if pickled is None else pickle.loads(pickled)
    except Exception:  # a class that only the worker knows
        return None
    return error if isinstance(error, BaseException) else None
