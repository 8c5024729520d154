"""The streams and events of CuPy, and of torch beside it, as `interface` has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy

from collectives.cuda.interface import Event

_runtime = cupy.cuda.runtime
# Names of the legacy default stream, which can't be captured.
_NULL_STREAMS = (0, 1)
# Of each thread's own default stream.
_PER_THREAD = 2
_SUCCESS, _NOT_READY = 0, 600


class CupyStream:
    """A CuPy stream, created here or the current one.

    CUDA's functions are called with the handles, without CuPy's methods in between.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.handle = stream, stream.ptr

    def record(self, event: Any = None) -> Event:
        """By cudaEventRecord."""
        recorded: CupyEvent = event or CupyEvent()
        _runtime.eventRecord(recorded.handle, self.handle)
        return recorded

    def wait(self, event: Any) -> None:
        """By cudaStreamWaitEvent."""
        _runtime.streamWaitEvent(self.handle, event.handle)

    def capturing(self) -> bool:
        """Whether it is being captured. The null stream can't be, and must not be queried."""
        return self.handle not in _NULL_STREAMS and bool(_runtime.streamIsCapturing(self.handle))

    def same_as(self, other: Any) -> bool:
        """By CuPy's objects: a handle may be that of a stream which was destroyed."""
        return self.stream is other.stream and self.handle != _PER_THREAD

    def synchronize(self) -> None:
        """By cudaStreamSynchronize."""
        self.stream.synchronize()


class ForeignStream:
    """Another library's stream, in CUDA's stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = int(handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version, and the stream."""
        return 0, self._handle


class CupyEvent:
    """An event without timing."""

    def __init__(self) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)
        self.handle = self._event.ptr

    def done(self) -> bool:
        """By cudaEventQuery. Raises the GPU's errors, which CuPy reports as "not yet"."""
        status = _runtime.eventQuery(self.handle)
        if status not in (_SUCCESS, _NOT_READY):
            raise _runtime.CUDARuntimeError(status)
        return bool(status == _SUCCESS)


def current_stream() -> CupyStream:
    """CuPy's."""
    return CupyStream(cupy.cuda.get_current_stream())


@contextmanager
def using(stream: Any) -> Iterator[None]:
    """Context in which a stream of CuPy is the current one.

    CuPy's own context forgets a stream that was made the current one by `use`.
    """
    before = cupy.cuda.get_current_stream()
    stream.use()
    try:
        yield
    finally:
        before.use()


def torch_on_gpus() -> Any:
    """The module torch where the program uses it on GPUs, else None."""
    torch = sys.modules.get("torch")
    # Another thread may be importing it.
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", bool)
    return torch if is_initialized() else None


def torch_stream(number: int) -> CupyStream:
    """The current stream of torch on the GPU of that number."""
    return CupyStream(cupy.cuda.Stream.from_external(ForeignStream(_torch_handle(number))))


def is_torchs(stream: CupyStream, number: int) -> bool:
    """Whether it is the current stream of torch on the GPU of that number."""
    return bool(stream.handle == _torch_handle(number))


def _torch_handle(number: int) -> int:
    # `torch.cuda.current_stream` takes several microseconds.
    return int(sys.modules["torch"]._C._cuda_getCurrentRawStream(number))


def follow(later: CupyStream, earlier: CupyStream) -> None:
    """Order later work on one stream after the present work of another."""
    if later.handle != earlier.handle:
        later.wait(earlier.record())
