"""Arrays that a stream still uses."""

from __future__ import annotations

from collections import deque

from collectives.devices.cuda import DeviceArray, Event


class Held:
    """What is held until the work that uses it is done.

    CuPy hands out memory again in the order of the stream that it was made for alone.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[Event, tuple[DeviceArray | None, ...]]] = deque()

    def hold(self, done: Event, *arrays: DeviceArray | None) -> None:
        """Until the event; what is done by now is let go."""
        while self._held and self._held[0][0].done():
            self._held.popleft()
        self._held.append((done, arrays))

    def let_go(self) -> None:
        """All of it: nothing runs any more."""
        self._held.clear()
