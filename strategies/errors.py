"""The errors of scheduled functions, beyond those of `collectives.errors` and Python's own.

An error that a function raises on a worker is raised on the chief as it is, with a
`RemoteTracebackError` as its cause.
"""

from __future__ import annotations

import concurrent.futures


class CancelledError(concurrent.futures.CancelledError):
    """A scheduled function was not run, since another one failed before, or since all ended.

    As `tf.errors.CancelledError`; `except concurrent.futures.CancelledError` catches it as well.
    It may be scheduled anew.
    """


class OutOfRangeError(Exception):
    """A scheduled function read beyond the end of a worker's dataset.

    As `tf.errors.OutOfRangeError`. On the worker, inside the function, it is StopIteration, so that
    loops end; it becomes this error where the function doesn't catch it.
    """


class RemoteError(RuntimeError):
    """A function failed on a worker with an exception that can't be sent; the text is its own."""


class RemoteTracebackError(Exception):
    """The traceback of an exception on a worker: the cause of the one raised here."""

    def __init__(self, place: str, text: str) -> None:
        """`place` names the worker and its rank, `text` is the traceback there."""
        super().__init__(place, text)
        self.place, self.text = place, text

    def __str__(self) -> str:
        return f"on {self.place}:\n{self.text}"
