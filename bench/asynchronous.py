"""The asynchronous form of a collective: each call is started, and waited for at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from collectives import Communicator


def waiting(comm: Communicator) -> Communicator:
    """The communicator with its collectives in their asynchronous form."""
    return cast(Communicator, _Waiting(comm))


class _Waiting:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Callable[..., Any]:
        start = getattr(self._comm, f"{name}_async")

        def call(*arguments: Any, **named: Any) -> Any:
            return start(*arguments, **named).wait()

        return call
