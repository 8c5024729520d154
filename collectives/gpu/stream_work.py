"""A stream for local work, and the work of a communicator on any stream.

Blocking calls of NCCL are enqueued on the caller's current stream, which needs no events between
streams, as those of torch's `ProcessGroupNCCL` with `async_op=False`. Asynchronous calls are
enqueued on a stream of the communicator, beside what the caller enqueues until it waits. The
streams that are made here have high priority. The host waits for none of them. Arrays are kept
until the work is done, or some calls longer, because CuPy reuses memory in the order of the stream
for which it was allocated.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from collectives.caching import LRU
from collectives.cuda.interface import Cuda, DeviceArray, Event, Stream
from collectives.errors import CollectiveError
from collectives.waiting.wait_policy import WaitingCall, WaitPolicy
from collectives.waiting.watchdog import GRACE_SECONDS, watch

_EVENTS_KEPT = 64
# Launches, and bytes of their arrays, that are kept although they may be done, to query fewer
# events.
_LAUNCHES_KEPT = 16
_BYTES_KEPT = 128 << 20
_CALLERS_KEPT = 8


class SideStream:
    """A stream for local work, which no deadline limits."""

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


Begun: TypeAlias = tuple[Stream, Event, Stream | None]
"""The stream for work, the event that it waits for, and the stream of the capture that it joined.

A plain tuple, since every call makes one.
"""


@dataclass(slots=True)
class _Launch:
    """Work enqueued on a stream."""

    what: object
    sequence: int | None
    ready: Event
    """The event that it waits for; the deadline counts from there."""
    done: Event
    held: tuple[object, ...]
    nbytes: int
    began: float | None = None

    def __str__(self) -> str:
        """The call and its number."""
        return str(WaitingCall(self.what, self.sequence))


class StreamWork:
    """The work of one communicator, in one order on all streams, and a stream of its own.

    What a graph does when it runs is not part of that order.
    """

    def __init__(
        self,
        cuda: Cuda,
        device: int,
        wait_policy: WaitPolicy,
        give_up: Callable[[BaseException], None],
        end_job: Callable[[str], None],
    ) -> None:
        """`give_up` ends the work because of an error.

        `end_job` ends the job at a deadline that no call can raise.
        """
        self._cuda, self._device, self._wait_policy = cuda, device, wait_policy
        self._give_up, self._end_job = give_up, end_job
        self.failure: Callable[[], Exception | None] = lambda: None
        """Returns the error of the work, as far as it is detected."""
        self._stream = cuda.new_stream()
        self._callers: LRU[int, Stream] = LRU(_CALLERS_KEPT)
        """Streams that were current where asynchronous calls were made, by handle."""
        self._last: Stream | None = None
        """The stream of the last work, held so that no other one gets its handle."""
        self._last_done: Any = None
        self.ended = False
        """Whether the work is aborted, or about to be: every wait raises an error."""
        self._launched: deque[_Launch] = deque()
        self._bytes = 0
        """Of the arrays that they hold."""
        self.captured: list[object] = []
        """Objects in use by captured graphs."""
        self._caller_at: Event | None = None
        """Recorded on one caller's stream after the other."""
        self._events: list[Event] = []
        """Events for reuse, because creating one takes longer than recording it."""
        self._waiting = 0
        """Number of calls that wait, and can raise an error instead of ending the job."""
        self._lock = threading.Lock()
        watch(self)

    @contextmanager
    def launch(self, *held: DeviceArray | None) -> Iterator[Stream]:
        """Context in which the stream of the work is the current one; `held` is used on it."""
        begun = self.begin()
        try:
            with self._cuda.on(begun[0]):
                yield begun[0]
        finally:
            # Also after an error, because enqueued work still uses the arrays.
            self.end(begun, held, sum(each.nbytes for each in held if each is not None))

    @contextmanager
    def beside(self, held: object) -> Iterator[None]:
        """Context whose calls are enqueued on the communicator's own stream.

        They use `held` besides their own arrays, and follow what the caller has enqueued. What the
        caller enqueues from now on does not wait for them. Calls that a graph captures are not
        moved.
        """
        current = self._cuda.current_streams()
        if any(stream.capturing() for stream in current):
            yield
            return
        for stream in current:
            self._callers.pop(stream.handle, None)
            self._callers.put(stream.handle, stream)
        for caller in self._callers.values():
            # An earlier one may still use memory of results, which this stream may use again.
            if not caller.capturing():
                self._caller_at = caller.record(self._caller_at)
                self._stream.wait(self._caller_at)
        with self._cuda.beside(self._stream):
            if held is None:
                yield
                return
            begun = self.begin()
            try:
                yield
            finally:
                self.end(begun, (held,), _BYTES_KEPT)

    def begin(self) -> Begun:
        """The current stream, ordered after all work enqueued before; for `end`.

        While a graph captures that stream, it is the communicator's own, which joins the capture.
        """
        current, events, last = self._cuda.current_stream(), self._events, self._last
        if current.capturing():
            ready = current.record()
            self._stream.wait(ready)
            return self._stream, ready, current
        if last is not None and not last.same_as(current):
            # NCCL's calls of a communicator must not overlap.
            current.wait(self._last_done)
        return current, current.record(events.pop() if events else None), None

    def end(self, begun: Begun, held: tuple[object, ...], nbytes: int) -> None:
        """Note the work enqueued since `begin`, which uses so many bytes of `held`."""
        (stream, ready, joined), events = begun, self._events
        if joined is not None:
            joined.wait(stream.record())
            # The work runs whenever the graph does, with the same memory.
            self.captured.append(held)
            return
        if self.ended and not self.captured:
            return
        done = stream.record(events.pop() if events else None)
        self._last, self._last_done = stream, done
        call = self._wait_policy.call
        with self._lock:
            if self._bytes >= _BYTES_KEPT:
                self._forget_done()
            elif len(self._launched) >= _LAUNCHES_KEPT:
                self._forget_half()
            self._launched.append(_Launch(call.what, call.sequence, ready, done, held, nbytes))
            self._bytes += nbytes

    def _forget_done(self) -> None:
        while self._launched and self._launched[0].done.done():
            self._forget_first()

    def _forget_half(self) -> None:
        """Forget the older half if it is done: its last launch ends after the others."""
        count = len(self._launched) // 2
        if self._launched[count - 1].done.done():
            for _ in range(count):
                self._forget_first()

    def _forget_first(self) -> None:
        past = self._launched.popleft()
        self._bytes -= past.nbytes
        if len(self._events) < _EVENTS_KEPT:
            # Re-recording an event does not affect the streams that already wait for it.
            self._events += past.ready, past.done

    def check_deadline(self) -> None:
        """End the job if work has exceeded the deadline and no call waits for it.

        The caller's next synchronization would block for ever, or use invalid data after an abort.
        """
        with self._lock:
            if not self._launched or self._waiting or self.ended:
                return
            self._cuda.use_device(self._device)
            self._forget_done()
            overdue = self._overdue(self._launched[0]) if self._launched else None
        if overdue is not None:
            self._end_job(overdue)

    def _overdue(self, launch: _Launch) -> str | None:
        if launch.began is None:
            launch.began = time.monotonic() if launch.ready.done() else None
            return None
        deadline, seconds = self._wait_policy.deadline, time.monotonic() - launch.began
        if deadline is None or seconds < deadline + GRACE_SECONDS:
            return None
        problem = self.failure() or "other ranks have not begun it, or have ended"
        return (
            f"{launch}, has run on the GPU for the deadline of {deadline:g} s, and no call"
            f" waits for it that could raise an error: the job ends ({problem})"
        )

    def wait(self, name: str, event: Event, timeout: float | None = None) -> None:
        """Block the host until the event, which follows work of this communicator.

        Raises DeadlineExceededError, RankFailedError or, for an NCCL error, CollectiveError; all
        work is then ended. Raises TimeoutError after `timeout` seconds; the work then continues.
        """
        end = None if timeout is None else time.monotonic() + timeout
        wait_policy = self._wait_policy.for_single_wait(name, self._wait_policy.deadline)
        wait_policy.check_alive = self._wait_policy.check_alive

        def done() -> bool:
            finished = event.done()
            if self.ended:
                # After an abort, unfinished work is done, too.
                raise CollectiveError(f"{name}: an error of another call has ended it")
            problem = None if finished else self.failure()
            if problem is not None:
                raise CollectiveError(f"{name}: {problem}") from problem
            if end is not None and time.monotonic() >= end and not finished:
                raise TimeoutError(f"not done after {timeout} s")
            return finished

        with self._lock:
            self._waiting += 1
        try:
            wait_policy.spin_until(done, dict)
        except CollectiveError as error:
            self._give_up(error)
            raise
        finally:
            with self._lock:
                self._waiting -= 1

    def finish(self) -> None:
        """Block the host until all work is done."""
        with self._lock:
            last = self._launched[-1] if self._launched else None
        if last is not None:
            self.wait(str(last), last.done)
        with self._lock:
            self._forget_done()

    def forget(self) -> None:
        """Release everything after an abort."""
        with self._lock:
            self._launched.clear()
            self._bytes, self._last = 0, None
