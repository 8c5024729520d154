"""Errors of asynchronous calls that no `wait` has raised, to be logged."""

from __future__ import annotations

import itertools
import threading
import weakref
from concurrent.futures import Future
from functools import partial
from typing import Any

from collectives.consistency.uncaught import report_before
from collectives.errors import summary_of
from collectives.waiting.wait_policy import log


class Failures:
    """The errors, until they are raised or logged.

    A program that has got the error of one call knows of those that it had started by then.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._known = -1
        self._unseen: list[tuple[weakref.ref[Future[Any]], str]] = []
        # A signal's handler may make a call while it is held.
        self._lock = threading.RLock()

    def begin(self) -> int:
        """The number of a call that is started."""
        return next(self._numbers)

    def fail(self, future: Future[Any], error: BaseException, number: int) -> None:
        """Store a call's error."""
        with self._lock:
            if number > self._known:
                text = summary_of(error)
                self._unseen.append((weakref.ref(future), text))
        future.set_exception(error)

    def saw(self, failed: Future[Any]) -> None:
        """Note that a `wait` raises a call's error."""
        with self._lock:
            if any(future() is failed for future, _ in self._unseen):
                self._known = next(self._numbers)
                self._unseen.clear()

    def report(self, *, ended: bool = False) -> None:
        """Log those of calls whose handles were dropped; at the program's end all of them."""
        if not self._unseen:
            return
        with self._lock:
            found = [(ended or future() is None, future, text) for future, text in self._unseen]
            self._unseen = [(future, text) for dropped, future, text in found if not dropped]
        for dropped, _, text in found:
            if dropped:
                log.error("an asynchronous call failed, and nothing has waited for it: %s", text)

    def forget(self) -> None:
        """In a forked child: the calls are the parent's."""
        self._lock = threading.RLock()
        self._unseen.clear()


failures = Failures()
report_before(partial(failures.report, ended=True))
