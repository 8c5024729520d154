"""The errors of scheduled functions, beyond those of `collectives.errors` and Python's own.

An error that a function raises on a worker is raised on the chief as it is, with a
`RemoteTracebackError` as its cause.
"""

from __future__ import annotations

import concurrent.futures

from collectives.messaging.remote_error import RemoteError, RemoteTracebackError

__all__ = ["CancelledError", "OutOfRangeError", "RemoteError", "RemoteTracebackError"]


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
