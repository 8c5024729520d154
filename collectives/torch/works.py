"""What torch calls a Work: the handle of a call.

A collective on a GPU is enqueued on a stream beside the program's before its work is made, and a
message to a GPU is copied on a stream of its own. `wait` orders the stream that is current then
after either, as with torch's own groups
(pytorch.org/docs/stable/distributed.html, "Synchronous and asynchronous collective operations").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future


class _OrderedWork(Work):
    """What `wait` orders, the other methods order too; torch's own would order nothing."""

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    block_current_stream = synchronize


class DoneWork(_OrderedWork):
    """A call that has ended well; `done` makes one, as a constructor in Python takes longer."""

    _tensors: list[Any]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> BaseException | None:
        """None."""
        return None

    def result(self) -> list[Any]:
        """The call's output tensors."""
        return self._tensors

    def get_future(self) -> Any:
        """A future of the output tensors."""
        future = Future(devices=gpus_of(self._tensors))
        future.set_result(self._tensors)
        return future


def done(tensors: list[Any]) -> DoneWork:
    """The handle of a call that has ended well, with its output tensors."""
    work = DoneWork()
    work._tensors = tensors
    return work


def gpus_of(tensors: Any) -> list[Any]:
    """The GPU of tensors in lists, as torch's futures take it; empty where there is none."""
    if isinstance(tensors, (list, tuple)):
        for each in tensors:
            if found := gpus_of(each):
                return found
        return []
    return [tensors.device] if getattr(tensors, "is_cuda", False) else []


class PendingWork(_OrderedWork):
    """A call that may not have ended; `finish` is called by the thread that makes it."""

    def __init__(self, tensors: list[Any], name: str, gpus: Sequence[Any] = ()) -> None:
        """`gpus` has the GPU of the call's tensors; none for those on the CPU."""
        super().__init__()
        self._tensors, self._name = tensors, name
        self.gpus, self._end = gpus, None
        self._stream: Any = None
        """That of its work on a GPU."""
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._finished = False
        self._lock = threading.Lock()
        self._future: Any = None

    def finish(self, error: BaseException | None) -> None:
        """End the call, with its error if it has failed.

        Its work on a GPU is on the current stream.
        """
        try:
            if self.gpus:
                self._stream = torch.cuda.current_stream(self.gpus[0].index)
                self._end = self._stream.record_event()
        except Exception as failed:
            # After an error, CUDA refuses every call.
            error = error or failed
        with self._lock:
            self._error, self._finished = error, True
            future = self._future
        try:
            if future is not None:
                self._complete(future)
        finally:
            # After the callbacks, one of which may wait: `_finished` was set before them.
            self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call's end, and raise its error; RuntimeError after the timeout."""
        seconds = timeout.total_seconds() if timeout else 0
        if not (self._finished or self._ended.wait(seconds if seconds > 0 else None)):
            raise RuntimeError(f"Timed out waiting {seconds * 1000:.0f}ms for {self._name}")
        if self._error is not None:
            raise self._error
        if self._end is not None:
            torch.cuda.current_stream(self.gpus[0].index).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        """Whether the tensors may be used on any stream, or `wait` would raise at once."""
        if not self._finished or self._end is None:
            return self._finished
        try:
            # A look at an event would end a capture.
            return bool(torch.cuda.is_current_stream_capturing() or self._end.query())
        except RuntimeError:  # of the GPU, which raises it at every call from now on
            return True

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self._finished and self._error is None

    def exception(self) -> BaseException | None:
        """The error of a call that has failed."""
        return self._error

    def result(self) -> list[Any]:
        """The call's output tensors, once it has ended."""
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        """A future of the output tensors, which raises the call's error."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = future = _CallFuture(self)
            finished = self._finished
        if finished:
            self._complete(future)
        return future

    def before_callbacks(self) -> None:
        """Wait for the call's end.

        A callback may make calls of its own, as that of PowerSGD does: in the thread of the program
        their order is the same on all ranks.
        """
        self._ended.wait()

    def _complete(self, future: Any) -> None:
        if self._error is None:
            # The future notes the current stream, after which its `wait` orders another one.
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                future.set_result(self._tensors)
        else:
            failure = _Failure(self._error)
            future._set_unwrap_func(failure.raise_error)
            future.set_result(failure)


class _CallFuture(Future):
    """The future of a call that may not have ended."""

    def __init__(self, work: PendingWork) -> None:
        # A future of GPUs takes nothing but tensors.
        super().__init__(devices=[] if work.exception() else list(work.gpus))
        self._work = work

    def wait(self) -> Any:
        """The call's output tensors; raises its error, as the work's `wait`."""
        self._work.wait()
        return super().wait()

    def value(self) -> Any:
        """As `wait`, of a call that has ended."""
        try:
            return super().value()
        except Exception:
            # A future of GPUs, made before the call failed, has another one.
            error = self._work.exception()
            if error is None:
                raise
            raise error from None

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """A future of the callback's result."""
        self._work.before_callbacks()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Run the callback when the call has ended."""
        self._work.before_callbacks()
        super().add_done_callback(callback)


class _Failure:
    """What a future holds instead of tensors: futures of Python have no error that C++ can read.

    DDP, which waits in C++, finds tensors in the value by pickling it.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def raise_error(self, _: Any = None) -> None:
        """Raise it."""
        raise self._error

    __reduce_ex__ = raise_error  # type: ignore[assignment]  # never returns


class AllWorks(_OrderedWork):
    """Several calls as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each of them."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The error of the first one that has failed."""
        return next(filter(None, [work.exception() for work in self._works]), None)

    def result(self) -> list[Any]:
        """The output tensors of all."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        """A future of the output tensors of all, which raises the first call's error."""
        try:
            self.wait()
        except Exception as error:
            failed = PendingWork([], "calls made together")
            failed.finish(error)
            return failed.get_future()
        return done(self.result()).get_future()
