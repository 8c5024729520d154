"""The chief's side: who runs what, and what becomes of it when a worker dies."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from collectives.errors import RankFailedError
from strategies.coordinator.closure_queue import Closure, ClosureQueue
from strategies.coordinator.failures import rebuild
from strategies.coordinator.link import Link
from strategies.coordinator.messages import End, Failed, Finished, Message, Packed, Run
from strategies.errors import CancelledError

LOOK_SECONDS = 0.1
"""How often it is looked who has died."""

_log = logging.getLogger("strategies")


class Dispatcher:
    """Gives each worker one closure at a time, and takes the results, in a thread of its own.

    Whoever makes an instance calls `end` before the program ends.
    """

    def __init__(
        self,
        queue: ClosureQueue,
        link: Link,
        unpack: Callable[[Finished, Packed], Any],
    ) -> None:
        """`unpack` makes a closure's result of what its worker sent."""
        self._queue, self._box, self._unpack = queue, link.box, unpack
        self._workers, self._servers = link.workers, link.servers
        self._living, self._idle = set(link.workers), deque(link.workers)
        self._running: dict[int, tuple[int, Closure]] = {}
        self._numbers = itertools.count()
        # Taken before that of the queue, never after it.
        self._lock = threading.Lock()
        self._ended, self._next_look = False, 0.0
        self._thread = threading.Thread(target=self._receive_all, name="coordinator", daemon=True)
        self._thread.start()

    def dispatch(self) -> None:
        """Give what is queued to workers that have nothing to do. Doesn't wait."""
        with self._lock:
            while self._idle and (closure := self._queue.take()) is not None:
                worker, number = self._idle.popleft(), next(self._numbers)
                self._running[worker] = number, closure
                self._send(worker, Run(number), closure.packed)

    def tell_all(self, header: Any, packed: Packed) -> None:
        """Send every worker a message, which it gets before what is dispatched later."""
        with self._lock:
            for worker in sorted(self._living):
                self._send(worker, header, packed)

    def end(self) -> None:
        """Let the workers end once they have run what they have. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self._queue.end(CancelledError("not run to its end: the coordinator has ended"))
        self.tell_all(End(), [])
        self._thread.join()
        self._drop_running()

    def _send(self, worker: int, header: Any, packed: Packed) -> None:
        try:
            self._box.send(worker, header, packed)
        except RankFailedError as error:
            self._lose(worker, str(error))

    def _lose(self, worker: int, reason: str) -> None:
        """Do without a worker, if it is counted on; the lock is held."""
        if worker not in self._living:
            return
        self._living.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        _log.warning("%s is lost (%s); %d left", self._workers[worker], reason, len(self._living))
        if worker in self._running:
            self._queue.put_back(self._running.pop(worker)[1])
        if not self._living:
            everybody = ", ".join(self._workers.values())
            self._queue.end(RankFailedError(f"no worker is left of {everybody}: {reason}"))

    def _receive_all(self) -> None:
        try:
            while self._living and not self._ended:
                if (message := self._box.receive(LOOK_SECONDS)) is not None:
                    self._handle(message)
                self._look()
        except Exception as error:  # for those who wait: this thread has nobody to tell
            self._queue.end(error)
            self._drop_running()

    def _handle(self, message: Message) -> None:
        closure = self._release(message.source, message.header.number)
        if closure is None:
            return
        if isinstance(message.header, Failed):
            place = self._workers[message.source]
            self._queue.fail(closure, rebuild(message.header.failure, place))
            return
        try:
            self.dispatch()  # so that the worker goes on meanwhile
        finally:
            self._finish(closure, message)

    def _release(self, worker: int, number: int) -> Closure | None:
        """What a worker has run, which makes it idle; None for what was given up."""
        with self._lock:
            running, closure = self._running.get(worker, (None, None))
            if running != number:
                return None
            del self._running[worker]
            self._idle.append(worker)
            return closure

    def _finish(self, closure: Closure, message: Message) -> None:
        try:
            value = self._unpack(message.header, message.arrays)
        except Exception as error:
            self._queue.fail(closure, error)
        else:
            self._queue.finish(closure, value)

    def _look(self) -> None:
        """See who has died or left; what a worker sent before that counts."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for rank in self._servers:
            if not self._box.alive(rank):
                self._queue.end(RankFailedError(f"{self._servers[rank]} has died"))
        # A worker that was interrupted may wait for the others before its process ends.
        lost = [rank for rank in list(self._living) if not self._box.present(rank)]
        if self._ended:
            return
        while lost and (message := self._box.receive(0)) is not None:
            self._handle(message)
        with self._lock:
            for rank in lost:
                self._lose(rank, "it has ended or died")
        if lost:
            self.dispatch()

    def _drop_running(self) -> None:
        with self._lock:
            while self._running:
                self._queue.put_back(self._running.popitem()[1][1])
