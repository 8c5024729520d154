"""The chief's side: which worker runs which function, and what follows when a worker dies."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from collectives.errors import RankFailedError
from collectives.messaging.rpc import POLL_SECONDS, Endpoint, PendingAnswer
from strategies.coordinator.closure_queue import Closure, ClosureQueue
from strategies.coordinator.link import End, Link, Run
from strategies.coordinator.packing import Packed
from strategies.errors import CancelledError

_log = logging.getLogger("strategies")


class Dispatcher:
    """Sends each worker one closure at a time, and receives the results in a thread of its own.

    The owner of an instance calls `end` before the program ends.
    """

    def __init__(
        self, queue: ClosureQueue, link: Link, unpack: Callable[[Any, Packed], Any]
    ) -> None:
        """`unpack(value, arrays)` makes a closure's result of its worker's answer."""
        self._queue, self._unpack = queue, unpack
        self._endpoint = Endpoint(link.box, lambda call: None)
        self._workers, self._servers = link.workers, link.servers
        self._living, self._idle = set(link.workers), deque(link.workers)
        self._running: dict[int, Closure] = {}
        # Taken before that of the queue, never after it.
        self._lock = threading.Lock()
        self._ending = self._ended = False
        self._thread = threading.Thread(target=self._receive_all, name="coordinator", daemon=True)
        self._thread.start()

    def dispatch(self) -> None:
        """Send what is queued to idle workers. Doesn't wait."""
        with self._lock:
            while self._idle and (closure := self._queue.take()) is not None:
                worker = self._idle.popleft()
                settle = partial(self._settle, worker, closure)
                # First, so that an error that leaves `request` puts the closure back.
                self._running[worker] = closure
                try:
                    with self._losing(worker):
                        self._endpoint.request(worker, Run(), closure.packed, settle)
                except BaseException:
                    # As Ctrl+C, which the program may catch to join what it has scheduled.
                    self._withdraw(worker)
                    raise

    def notify_all(self, body: Any, packed: Packed) -> None:
        """Send every worker a notification, which precedes what is dispatched later."""
        with self._lock:
            for worker in sorted(self._living):
                with self._losing(worker):
                    self._endpoint.notify(worker, body, packed)
        self.dispatch()  # what a worker ran that was lost here

    def end(self) -> None:
        """End the workers' service after what they run now. A second call does nothing."""
        if self._ended:
            return
        self._ending = True
        try:
            self._queue.end(CancelledError("not run to its end: the coordinator has ended"))
            self.notify_all(End(), [])
            self._ended = True
        finally:
            # After Ctrl+C the end of the program ends it once more.
            self._ending = self._ended
        self._thread.join()
        self._put_back_running()

    @contextmanager
    def _losing(self, worker: int) -> Iterator[None]:
        """Lose the worker where nothing can be sent to it; the lock is held."""
        try:
            yield
        except RankFailedError as error:
            self._lose(worker, str(error))

    def _lose(self, worker: int, reason: str) -> None:
        """Continue without a worker; the lock is held."""
        if worker not in self._living:
            return
        self._living.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        _log.warning("%s is lost (%s); %d left", self._workers[worker], reason, len(self._living))
        if worker in self._running:
            self._queue.put_back(self._running.pop(worker))
        if not self._living:
            workers = ", ".join(self._workers.values())
            self._queue.end(RankFailedError(f"no worker is left of {workers}: {reason}"))

    def _withdraw(self, worker: int) -> None:
        """Let another request follow the one that was interrupted; the lock is held."""
        if worker in self._running:
            self._queue.put_back(self._running.pop(worker))
            if worker in self._living:
                self._idle.appendleft(worker)

    def _receive_all(self) -> None:
        try:
            while self._living and not self._ended:
                self._endpoint.step(POLL_SECONDS)
                self._check_liveness()
                self.dispatch()  # what an interrupt has put back
        except Exception as error:  # raised where results are waited for: no caller is here
            self._queue.end(error)
            self._put_back_running()

    def _settle(self, worker: int, closure: Closure, answer: PendingAnswer) -> None:
        """A worker has answered; that of a lost worker is dropped."""
        with self._lock:
            if self._running.get(worker) is not closure:
                return
            del self._running[worker]
            self._idle.append(worker)
        error = answer.error()
        if error is not None:
            self._queue.fail(closure, error)
            return
        try:
            self.dispatch()  # first, so that the worker runs meanwhile
        finally:
            self._finish(closure, answer)

    def _finish(self, closure: Closure, answer: PendingAnswer) -> None:
        try:
            uses, arrays = answer.result()
            value = self._unpack(uses, list(arrays))
        except Exception as error:
            self._queue.fail(closure, error)
        else:
            self._queue.finish(closure, value)

    def _check_liveness(self) -> None:
        """Lose workers that have died or ended, after the answers that they sent before."""
        # A worker that was interrupted may wait for the others before its process ends.
        gone = self._endpoint.departed([*self._servers, *self._living])
        for server in self._servers:
            if server in gone and not self._endpoint.alive(server):
                self._queue.end(RankFailedError(f"{self._servers[server]} has died"))
        lost = [rank for rank in gone if rank in self._workers]
        if not lost or self._ending:
            return
        self._endpoint.drain()
        with self._lock:
            for rank in lost:
                self._lose(rank, "it has ended or died")
        self.dispatch()

    def _put_back_running(self) -> None:
        with self._lock:
            while self._running:
                self._queue.put_back(self._running.popitem()[1])
