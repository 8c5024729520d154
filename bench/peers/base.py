"""Interface of another library to the benchmark."""

from __future__ import annotations

from typing import Any

from bench.cases.base import Call
from bench.problem import DType
from bench.task import Task


class PeerUnavailableError(RuntimeError):
    """The peer can't be measured here; the message says what is missing."""


class Peer:
    """Another library's collectives, one method for each.

    A method has the collective's name and takes a `Task`. It returns a call that writes into
    `task.out`, or None if the library has no equivalent.
    """

    name: str

    def call(self, collective: str, task: Task, *, nonblocking: bool = False) -> Call | None:
        """The library's call for the task, or None.

        nonblocking: started and waited for by two calls, where the library has such.
        """
        if nonblocking:
            return None
        make: Any = getattr(self, collective, None)
        call: Call | None = make(task) if make else None
        return call

    def dtype_for(self, dtype: DType) -> DType:
        """The dtype in which the library reduces, if not `dtype`; the element count is the same."""
        return dtype

    def close(self) -> None:
        """Release all resources."""
