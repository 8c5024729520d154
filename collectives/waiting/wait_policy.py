"""How a rank waits for others: it spins, then yields, then sleeps, and never for ever.

A wait of microseconds is spun through, since giving up the core costs more. Where ranks outnumber
the cores, whoever is waited for may need this core: then every poll yields. After a while the wait
sleeps between polls, so that a rank that waits for seconds leaves its core to others.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType

from collectives.errors import DeadlineExceededError

log = logging.getLogger("collectives")


@lru_cache(maxsize=64)
def warn_once(text: str) -> None:
    """A warning that a process gives no second time."""
    log.warning("%s", text)


DEFAULT_DEADLINE = 300.0

CHECK_SECONDS = 0.1
"""How often a wait asks whether the others can still come."""

_SPINS = 1000
_YIELD_SECONDS = 2e-3
_PATIENT_YIELD_SECONDS = 20e-6
_LONGEST_SLEEP = 1e-3
_PACKAGES = ("collectives", "strategies")

Absent = Callable[[], dict[int, str]]
"""Whom a wait waits for: what is known of each such rank."""


@dataclass
class WaitingCall:
    """The call that waits."""

    what: object = "nothing"
    """Told by its text."""
    sequence: int | None = 0
    """None of a message between two ranks."""
    line: str | None = None
    scope: str | None = None
    """What the call is made for, where that has a name."""

    def __str__(self) -> str:
        """The call and its number."""
        call = str(self.what) if self.scope is None else f"{self.scope}: {self.what}"
        return call if self.sequence is None else f"{call}, call {self.sequence}"


class WaitPolicy:
    """One rank's waits on one communicator."""

    def __init__(self, deadline: float | None = DEFAULT_DEADLINE) -> None:
        self.deadline = deadline
        self.call = WaitingCall()
        self.spins = _SPINS
        self._yield_seconds = _YIELD_SECONDS
        self.check_alive: Callable[[], None] = lambda: None
        self.before_raise: Callable[[BaseException], None] = lambda error: None
        self._limit: float | None = None

    @contextmanager
    def no_longer_than(self, seconds: float | None) -> Iterator[None]:
        """Within it wait `seconds` at most, if it is a number, and say nothing about it."""
        self._limit = seconds
        try:
            yield
        finally:
            self._limit = None

    @property
    def limited(self) -> bool:
        """Whether it is within `no_longer_than`: the call is made again."""
        return self._limit is not None

    def all_arrived(self) -> None:
        """All have come: what follows takes the time it takes."""
        self._limit = None

    def share_cores(self) -> None:
        """Yield at every poll: there are more ranks than cores."""
        self.spins = 0

    def sleep_early(self) -> None:
        """Leave the core, and Python's lock, to a thread that computes."""
        self.spins, self._yield_seconds = 0, _PATIENT_YIELD_SECONDS

    def another(self, what: str, deadline: float | None) -> WaitPolicy:
        """One for a single wait, which may go on beside others, of the same manners."""
        other = WaitPolicy(deadline)
        other.spins, other._yield_seconds = self.spins, self._yield_seconds
        other.call = WaitingCall(what, None)
        return other

    def spin_until(self, ready: Callable[[], bool], absent: Absent) -> None:
        """As `until`, but spin first."""
        for _ in range(self.spins):
            if ready():
                return
        self.until(ready, absent)

    def until(self, ready: Callable[[], bool], absent: Absent, grace: float = 0.0) -> None:
        """Return when `ready()`.

        Raises DeadlineExceededError, which names the ranks in `absent()`, once the deadline, and so
        many seconds of grace, are over; warns after a tenth of the deadline.
        """
        start = time.monotonic()
        warned, next_check = False, CHECK_SECONDS
        while not ready():
            waited = time.monotonic() - start
            if waited < self._yield_seconds:
                os.sched_yield()
                continue
            time.sleep(min(_LONGEST_SLEEP, waited / 20))
            if waited >= next_check:
                next_check = waited + CHECK_SECONDS
                self.check_alive()
            if self._limit is not None and waited >= self._limit and not ready():
                raise DeadlineExceededError("", tuple(absent()))
            if self.deadline is None or self._limit is not None:
                continue
            if not warned and waited >= self.deadline / 10:
                warned = True
                log.warning("%s", self._text(f"has waited {waited:.3g} s for", absent()))
            if waited >= self.deadline + grace and not ready():
                raise self.exceeded(absent())

    def exceeded(self, absent: dict[int, str]) -> DeadlineExceededError:
        """The error for a wait that the ranks in `absent` did not end in time."""
        waited = f"waited the deadline of {self.deadline:g} s for"
        error = DeadlineExceededError(self._text(waited, absent), tuple(absent))
        self.before_raise(error)
        return error

    def _text(self, waited: str, absent: dict[int, str]) -> str:
        ranks = ", ".join(f"rank {rank}{note}" for rank, note in sorted(absent.items()))
        call = self.call
        line = call.line or calling_line()
        return f"{call}, {waited} {ranks or 'other ranks'} ({line})"


def calling_line(frame: FrameType | None = None) -> str:
    """The file and line of the innermost frame that is not ours, from here or a given frame out."""
    frame = frame or sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def check_deadline(deadline: float | None) -> float | None:
    """Seconds, or None for no deadline; ValueError or TypeError otherwise."""
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, int | float):
        raise TypeError(f"deadline={deadline!r}: must be a number of seconds, or None")
    if not deadline > 0:
        raise ValueError(f"deadline={deadline!r}: must be a positive number of seconds, or None")
    return float(deadline)
