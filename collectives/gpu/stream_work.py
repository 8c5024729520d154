"""The work that a communicator has put on its stream.

It has a stream of its own, of high priority, which is ordered by events against the caller's
current stream, in both directions: what is put on it waits for what the caller did before, and what
the caller does later waits for it. The host waits for neither. The arrays are held until the work
is done, since CuPy hands out memory again in the order of the stream that it was made for alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from collectives.cuda.interface import Cuda, DeviceArray, Event, Stream
from collectives.errors import CollectiveError, DeadlineExceededError, RankFailedError
from collectives.waiting.wait_policy import WaitingCall, WaitPolicy
from collectives.waiting.watchdog import GRACE_SECONDS, watch

_EVENTS_KEPT = 64


@dataclass
class _Launch:
    """Work that was put on the stream."""

    what: object
    sequence: int | None
    ready: Event
    """What it waits for: the deadline counts from there on."""
    done: Event
    held: tuple[DeviceArray | None, ...]
    began: float | None = None

    def __str__(self) -> str:
        """The call and its number."""
        return str(WaitingCall(self.what, self.sequence))


class StreamWork:
    """One communicator's stream, and what runs on it."""

    def __init__(
        self,
        cuda: Cuda,
        device: int,
        wait_policy: WaitPolicy,
        *,
        failure: Callable[[], Exception | None],
        give_up: Callable[[BaseException], None],
        end_job: Callable[[str], None],
    ) -> None:
        """`failure` tells what went wrong on the stream, as far as is known.

        `give_up` ends what runs there, because of an error; `end_job` is for a deadline that no
        one's call can raise.
        """
        self._cuda, self._device, self._wait_policy = cuda, device, wait_policy
        self._failure, self._give_up, self._end_job = failure, give_up, end_job
        self.stream = cuda.new_stream()
        self._launched: deque[_Launch] = deque()
        self.captured: list[object] = []
        """What graphs use."""
        self._events: list[Event] = []
        """To be used again: to make one takes longer than to record it."""
        self._waiting = 0
        """Calls that can raise an error, in which nobody need end the job."""
        self._lock = threading.Lock()

    @contextmanager
    def launch(self, *held: DeviceArray | None) -> Iterator[None]:
        """Within it the communicator's stream is the current one; `held` is used on it."""
        caller, ready = self.begin()
        try:
            with self._cuda.on(self.stream):
                yield
        finally:
            # After an error too: what was put on the stream still uses the arrays.
            self.end(caller, ready, held)

    def begin(self) -> tuple[Stream, Event]:
        """What is put on the stream from now on comes after the caller's work."""
        caller = self._cuda.current_stream()
        events = self._events
        ready = caller.record(events.pop() if events and not caller.capturing() else None)
        self.stream.wait(ready)
        return caller, ready

    def end(self, caller: Stream, ready: Event, held: tuple[DeviceArray | None, ...]) -> None:
        """The caller's work from now on comes after what was put on the stream since `begin`."""
        capturing, events = caller.capturing(), self._events
        done = self.stream.record(events.pop() if events and not capturing else None)
        caller.wait(done)
        if capturing:
            # It runs when the graph does: again and again, with the same memory.
            self.captured.append(held)
            return
        call = self._wait_policy.call
        with self._lock:
            self._forget_done()
            self._launched.append(_Launch(call.what, call.sequence, ready, done, held))
        watch(self)

    def _forget_done(self) -> None:
        launched = self._launched
        while launched and launched[0].done.done():
            past = launched.popleft()
            if len(self._events) < _EVENTS_KEPT:
                # Who waits for them already is not concerned by what they will mean.
                self._events += past.ready, past.done

    def check_deadline(self) -> None:
        """End the job where work has run for longer than the deadline, and nobody waits for it.

        The caller's next synchronisation would wait for ever, or see garbage once it was aborted.
        """
        with self._lock:
            if not self._launched or self._waiting:
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
        problem = self._failure() or "other ranks have not begun it, or have ended"
        return (
            f"{launch}, has run on the GPU for the deadline of {deadline:g} s, and no call"
            f" waits for it that could raise an error: the job ends ({problem})"
        )

    def wait(self, name: str, event: Event, timeout: float | None = None) -> None:
        """Let the host wait for the event, which lies behind work of this stream.

        Raises DeadlineExceededError, RankFailedError or, for what NCCL reports, CollectiveError,
        after which nothing runs any more; TimeoutError after `timeout` seconds, when it goes on.
        """
        end = None if timeout is None else time.monotonic() + timeout
        wait_policy = self._wait_policy.for_single_wait(name, self._wait_policy.deadline)
        wait_policy.check_alive = self._wait_policy.check_alive

        def over() -> bool:
            problem = None if event.done() else self._failure()
            if problem is not None:
                raise CollectiveError(f"{name}: {problem}") from problem
            if end is not None and time.monotonic() >= end and not event.done():
                raise TimeoutError(f"not done after {timeout} s")
            return event.done()

        self._waiting += 1
        try:
            wait_policy.spin_until(over, dict)
        except (DeadlineExceededError, RankFailedError, CollectiveError) as error:
            self._give_up(error)
            raise
        finally:
            self._waiting -= 1

    def finish(self) -> None:
        """Let the host wait for all that was put on the stream."""
        with self._lock:
            last = self._launched[-1] if self._launched else None
        if last is not None:
            self.wait(str(last), last.done)
        with self._lock:
            self._forget_done()

    def forget(self) -> None:
        """Hold nothing any more: what ran was aborted."""
        with self._lock:
            self._launched.clear()
