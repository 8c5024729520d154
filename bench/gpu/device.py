"""Interface to a GPU for timing, in addition to `Cuda`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bench.cases.base import Call


class Device(Protocol):
    """The current GPU and the current stream."""

    name: str
    l2_bytes: int
    libraries: str
    """Versions of CUDA's driver and runtime, and of the library through which they are called."""

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds of the work on the stream, from the first call's launch to the last one's end.

        If the host launches more slowly than the GPU works, that is the host's time.
        """

    def capture(self, work: Callable[[], Any]) -> Call:
        """A graph of the work; calling it launches the graph on the stream."""

    def synchronize(self) -> None:
        """Wait for the stream."""
