"""Asynchronous calls: a thread makes their progress while the caller computes."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from collectives.engine import Engine
from collectives.operations import Operation
from collectives.transports.base import Transport

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """The promise of an asynchronous call's result.

    It may be dropped: the call is completed all the same, before the program exits at the latest.
    """

    def __init__(self, future: Future[Result]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Result:
        """The result; the same object at every call.

        Raises what the collective raised, and TimeoutError where `timeout` seconds go by before it
        has ended (it goes on all the same).
        """
        return self._future.result(timeout)


class Progress:
    """The thread that runs asynchronous calls, in the order of their submission on every rank.

    It has a duplicate of the communicator for itself, so that its messages and those of blocking
    calls never meet.
    """

    def __init__(self, complete_duplicate: Callable[[], Transport]) -> None:
        self._complete_duplicate = complete_duplicate
        self._jobs: queue.SimpleQueue[tuple[Operation, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="collectives-progress", daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, operation: Operation) -> Handle[Any]:
        """Queue the operation; return at once."""
        future: Future[Any] = Future()
        self._jobs.put((operation, future))
        return Handle(future)

    def close(self) -> None:
        """Complete what was submitted, then end the thread. A second call does nothing."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        transport = self._complete_duplicate()
        engine = Engine(transport)
        while (job := self._jobs.get()) is not None:
            operation, future = job
            try:
                future.set_result(engine.perform(operation))
            except BaseException as error:  # handed to whoever waits
                future.set_exception(error)
        transport.close()


_running: weakref.WeakSet[Progress] = weakref.WeakSet()


@atexit.register
def _complete_all() -> None:
    """MPI must not end while a thread is inside it."""
    for progress in list(_running):
        progress.close()
