"""A side stream for local work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from collectives.cuda.interface import Cuda, DeviceArray, Event


class SideStream:
    """A stream ordered by events against the caller's current stream, in both directions.

    Arrays in use are kept until the work is done, because CuPy reuses memory in the order of the
    stream for which it was allocated.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self.stream = cuda, cuda.new_stream()
        self._held: deque[tuple[Event, tuple[DeviceArray | None, ...]]] = deque()

    @contextmanager
    def work(self, *used: DeviceArray | None) -> Iterator[None]:
        """Context in which this stream is the current one; `used` are the arrays in use."""
        caller = self._cuda.current_stream()
        self.stream.wait(caller.record())
        try:
            with self._cuda.on(self.stream):
                yield
        finally:
            # Also after an error, because enqueued work still uses the arrays.
            done = self.stream.record()
            caller.wait(done)
            while self._held and self._held[0][0].done():
                self._held.popleft()
            self._held.append((done, used))

    def release(self) -> None:
        """Release all arrays; no work may be running."""
        self._held.clear()
