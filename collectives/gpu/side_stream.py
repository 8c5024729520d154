"""A stream beside the caller's, for work that ends by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from collectives.cuda.interface import Cuda, DeviceArray, Event


class SideStream:
    """Ordered by events against the caller's current stream, in both directions.

    What work uses is held until it is done: CuPy hands out memory again in the order of the stream
    that it was made for alone.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self.stream = cuda, cuda.new_stream()
        self._held: deque[tuple[Event, tuple[DeviceArray | None, ...]]] = deque()

    @contextmanager
    def work(self, *used: DeviceArray | None) -> Iterator[None]:
        """Within it this stream is the current one, and `used` are what is used on it."""
        caller = self._cuda.current_stream()
        self.stream.wait(caller.record())
        try:
            with self._cuda.on(self.stream):
                yield
        finally:
            # After an error too: what was put on the stream still uses the arrays.
            done = self.stream.record()
            caller.wait(done)
            while self._held and self._held[0][0].done():
                self._held.popleft()
            self._held.append((done, used))

    def let_go(self) -> None:
        """Hold nothing any more: nothing runs."""
        self._held.clear()
