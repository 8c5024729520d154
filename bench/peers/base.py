"""What the benchmark asks of another library."""

from __future__ import annotations

from typing import Any

from bench.cases.base import Call
from bench.problem import DType
from bench.task import Task


class PeerUnavailableError(RuntimeError):
    """The peer can't be measured here; the text says what is missing."""


class Peer:
    """Another library's collectives, one method for each.

    A method is named as the collective and takes a `Task`; it returns a call that writes into
    `task.out`, or None where the library has none that does the same.
    """

    name: str

    def call(self, collective: str, task: Task) -> Call | None:
        """The library's call for the task, if it has one."""
        make: Any = getattr(self, collective, None)
        call: Call | None = make(task) if make else None
        return call

    def dtype_for(self, dtype: DType) -> DType:
        """In what the library reduces as many elements, if not in `dtype`."""
        return dtype

    def close(self) -> None:
        """Give everything back."""
