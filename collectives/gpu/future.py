"""Handles of asynchronous calls on device arrays."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from collectives.cuda.interface import Event
from collectives.lifecycle.futures import Handle


class DeviceHandle(Handle[Any]):
    """The future result of a call that a GPU executes.

    The call itself was enqueued at once, in program order, as NCCL requires.
    """

    def __init__(
        self, future: Future[Any], event: Event | None, wait: Callable[[Event, float | None], None]
    ) -> None:
        """`event` follows the call on the caller's stream; None if the call failed."""
        super().__init__(future)
        self._event, self._wait = event, wait

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._event is None or self._event.done()

    def wait(self, timeout: float | None = None) -> Any:
        """The result, once the GPU has finished; every call returns the same object."""
        result = super().wait(timeout)
        if self._event is not None:
            self._wait(self._event, timeout)
        return result
