"""What is needed of a GPU to time calls on it, beside `Cuda`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bench.cases.base import Call


class Device(Protocol):
    """The current GPU and the current stream."""

    name: str
    l2_bytes: int
    libraries: str
    """CUDA's driver and runtime, and what they are called through."""

    def seconds(self, work: Callable[[], Any]) -> float:
        """How long the stream is at the work, from the first call's launch to the last one's end.

        Where the host launches more slowly than the GPU works, that is the host's time.
        """

    def capture(self, work: Callable[[], Any]) -> Call:
        """A graph of the work, to be put on the stream by calling it."""

    def synchronize(self) -> None:
        """Wait for the stream."""
