"""Device memory that calls on several streams use one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from collectives.cuda.interface import Cuda, DeviceArray, Event


class OrderedMemory:
    """Memory for the calls of one communicator, on the GPU that is current when it is made."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        # Arrays are allocated for this stream, which waits for every call and does nothing else:
        # pools reuse memory in the order of its stream.
        self._stream = cuda.new_stream()
        self._last: Event | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context ordered after earlier calls, and before later ones, on the current stream."""
        stream = self.cuda.current_stream()
        if stream.capturing():
            # Events can't be waited for across the boundary of a capture.
            yield
            return
        if self._last is not None:
            stream.wait(self._last)
        try:
            yield
        finally:
            self._last = stream.record()
            self._stream.wait(self._last)

    def empty(self, length: int, dtype: np.dtype[Any]) -> DeviceArray:
        """New memory, to be written by the call that holds `turn`."""
        with self.cuda.on(self._stream):
            made = self.cuda.empty(length, dtype)
        self.cuda.current_stream().wait(self._stream.record())
        return made
