"""The closures that wait for a worker or run on one, and the error that is yet to be raised.

A state machine without workers and messages. Its rules are those of
TensorFlow's `ClusterCoordinator`, except that an error cancels what is queued at once, where
TensorFlow goes on until the error is raised.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from strategies.coordinator.packing import Packed
from strategies.coordinator.values import RemoteValue
from strategies.errors import CancelledError

QUEUE_LIMIT = 256 * 1024
"""The most closures that are queued, as in TensorFlow."""


class Closure:
    """A function and its arguments, packed, and the result that is promised."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.result = RemoteValue()


class ClosureQueue:
    """Closures in the order in which they are scheduled. Threads may use it at once.

    Each closure is queued, then taken, then finished or failed; or put back, where its worker died,
    and taken again; or cancelled while it is queued. After the first failure nothing is taken until
    `put`, `join` or `done` has raised it, once nothing runs.
    """

    def __init__(self, limit: int = QUEUE_LIMIT) -> None:
        self._limit = limit
        self._queued: deque[Closure] = deque()
        self._running: set[Closure] = set()
        self._error: BaseException | None = None
        self._end: BaseException | None = None
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._rest = threading.Condition(self._lock)
        # What another thread schedules during a join follows the join.
        self._gate = threading.Lock()

    def put(self, closure: Closure) -> None:
        """Queue a closure; waits while the queue is full. Raises a pending error."""
        with self._gate, self._lock:
            self._room.wait_for(lambda: self._failed() or len(self._queued) < self._limit)
            self._raise_error()
            self._queued.append(closure)

    def take(self) -> Closure | None:
        """The next closure, which runs from now on; None where none is queued."""
        with self._lock:
            if not self._queued:
                return None
            closure = self._queued.popleft()
            self._running.add(closure)
            self._room.notify()
            return closure

    def finish(self, closure: Closure, value: Any) -> None:
        """A closure that ran has returned."""
        with self._lock:
            closure.result.settle(value)
            self._leave(closure)

    def fail(self, closure: Closure, error: BaseException) -> None:
        """A closure that ran has raised. Cancels all that are queued."""
        with self._lock:
            closure.result.fail(error)
            if self._error is None:
                self._error = error
                self._fail_queued(_cancelled(f"another one failed: {error!r}"))
            self._leave(closure)

    def put_back(self, closure: Closure) -> None:
        """A closure that ran has lost its worker: it is the next to be taken."""
        with self._lock:
            if self._end is not None:
                closure.result.fail(self._end)
            elif self._error is not None:
                closure.result.fail(_cancelled(f"another one failed: {self._error!r}"))
            else:
                self._queued.appendleft(closure)
            self._leave(closure)

    def end(self, error: BaseException) -> None:
        """Nothing will be taken any more: every call raises this error from now on."""
        with self._lock:
            if self._end is None:
                self._end = error
                self._fail_queued(error)
                self._wake()

    def join(self) -> None:
        """Wait until nothing is queued or runs; raises the error that is yet to be."""
        with self._gate, self._lock:
            self._rest.wait_for(lambda: not self._running and not self._queued)
            self._raise_error()

    def done(self) -> bool:
        """Whether nothing is queued or runs; raises the error that is yet to be."""
        with self._lock:
            self._raise_error()
            return not self._queued and not self._running

    def _raise_error(self) -> None:
        if not self._failed():
            return
        self._rest.wait_for(lambda: not self._running)
        error, self._error = self._error, None
        error = self._end or error
        # Another thread may have raised it meanwhile.
        if error is not None:
            raise error.with_traceback(None)

    def _failed(self) -> bool:
        return self._error is not None or self._end is not None

    def _leave(self, closure: Closure) -> None:
        self._running.remove(closure)
        self._wake()

    def _wake(self) -> None:
        if self._failed():
            self._room.notify_all()
        if not self._running:
            self._rest.notify_all()

    def _fail_queued(self, error: BaseException) -> None:
        while self._queued:
            self._queued.popleft().result.fail(error)


def _cancelled(reason: str) -> CancelledError:
    return CancelledError(f"the scheduled function was not run to its end: {reason}")
