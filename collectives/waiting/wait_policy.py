"""Wait policy: spin, then yield, then sleep, up to a deadline.

A wait of microseconds spins, because yielding the core costs more. Where the cores are
oversubscribed, every poll yields, because the awaited rank may need this core. After a few
milliseconds the wait sleeps between polls, so that a long wait leaves the core to other work.
Where the polls move data on a link, which a sleep would leave idle, it yields for longer.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from types import FrameType

from collectives.errors import DeadlineExceededError

log = logging.getLogger("collectives")


@lru_cache(maxsize=64)
def warn_once(text: str) -> None:
    """Log a warning once per process."""
    log.warning("%s", text)


DEFAULT_DEADLINE = 300.0

IN_CALL = " in the middle of the call"
"""Note on a rank that has made the call, and then keeps another one waiting."""

CHECK_SECONDS = 0.1
"""Seconds between two checks whether the other ranks are still alive."""

YIELDS = 20
"""Polls without a look at the clock, between which the core is yielded to others."""

_SPINS = 1000
_YIELD_SECONDS = 2e-3
_YIELD_SECONDS_IN_TRANSIT = 20e-3
_EARLY_SLEEP_YIELD_SECONDS = 20e-6
_LONGEST_SLEEP = 1e-3
_LONGEST_SLEEP_IN_TRANSIT = 0.1e-3
_LINK_BYTES = 32 << 10
_PROGRESS_SECONDS = 0.3e-3
# Frameworks call this package for the user, and these packages of others lie in between.
_PACKAGES = ("collectives", "strategies", "torch", "tensorflow", "keras", "jax")
_PASSED_THROUGH = ("concurrent", "contextlib", "threading", "typing_extensions")

Absent = Callable[[], dict[int, str]]
"""Returns the ranks that a wait still waits for, each with a note on its state."""


@dataclass
class WaitingCall:
    """Description of the call that waits, for messages."""

    what: object = "the start of the communicator"
    """The call; messages show its `str`."""
    sequence: int | None = None
    """The call's number, or None for what has none, such as a message between two ranks."""
    scope: str | None = None
    """Name of the enclosing operation, where it has one."""

    def moves_data(self, exchange: object) -> bool:
        """Whether the exchange with its check, if any, is more than a link's buffers hold."""
        nbytes: int = getattr(self.what, "nbytes", 0)
        return exchange is not None and nbytes > _LINK_BYTES

    def __str__(self) -> str:
        """The call and its number."""
        call = str(self.what) if self.scope is None else f"{self.scope}: {self.what}"
        return call if self.sequence is None else f"{call}, call {self.sequence}"


class WaitPolicy:
    """How one rank waits on one communicator."""

    def __init__(self, deadline: float | None = DEFAULT_DEADLINE) -> None:
        self.deadline = deadline
        self.call = WaitingCall()
        self.spins, self.yields = _SPINS, YIELDS
        self._yield_seconds = _YIELD_SECONDS
        self.check_alive: Callable[[], None] = lambda: None
        self.progress: Callable[[], object] = lambda: None
        """Moves messages in transit on; a longer wait calls it from time to time."""
        self.before_raise: Callable[[BaseException], None] = lambda error: None
        self.world_ranks: Callable[[], Sequence[int]] = tuple
        """The ranks' numbers in the world; none where they are the same."""
        self.line: str | None = None
        """Where the user made a call that another thread makes."""
        self._warned: float | None = None
        """The `start` of the last wait that has logged its warning."""
        self.limit: float | None = None
        """Of `no_longer_than`, until every rank has arrived; its caller then repeats the call."""

    @contextmanager
    def no_longer_than(self, seconds: float | None) -> Iterator[None]:
        """Within the context, a wait ends by an error without a text after `seconds`, if not None.

        It is a DeadlineExceededError that is neither logged nor given to `before_raise`.
        """
        self.limit = seconds
        try:
            yield
        finally:
            self.limit = None

    def sleep_early(self) -> None:
        """Leave the core and Python's lock to a computing thread."""
        self.spins = self.yields = 0
        self._yield_seconds = _EARLY_SLEEP_YIELD_SECONDS

    @contextmanager
    def sleeping_early(self) -> Iterator[None]:
        """Within the context, wait as after `sleep_early`: another thread computes meanwhile."""
        usual = self.spins, self.yields, self._yield_seconds
        self.sleep_early()
        try:
            yield
        finally:
            self.spins, self.yields, self._yield_seconds = usual

    def for_single_wait(self, what: str, deadline: float | None) -> WaitPolicy:
        """A policy with the same spin and yield times for a single, possibly concurrent wait."""
        other = WaitPolicy(deadline)
        other.spins, other.yields = self.spins, self.yields
        other._yield_seconds = self._yield_seconds
        other.call = WaitingCall(what, None)
        other.world_ranks = self.world_ranks
        return other

    def poll_word(self, words: memoryview, index: int, word: int) -> bool:
        """Poll a fixed number of times, without the clock; whether `words[index]` became `word`."""
        for _ in range(self.spins):
            if words[index] == word:
                return True
        for _ in range(self.yields):
            os.sched_yield()
            if words[index] == word:
                return True
        return False

    def spin_until(
        self,
        ready: Callable[[], bool],
        absent: Absent,
        start: float | None = None,
        *,
        in_transit: bool = False,
    ) -> None:
        """Like `until`, but spin first."""
        for _ in range(self.spins):
            if ready():
                return
        self.until(ready, absent, start=start, in_transit=in_transit)

    def until(
        self,
        ready: Callable[[], bool],
        absent: Absent,
        grace: float = 0.0,
        start: float | None = None,
        *,
        in_transit: bool = False,
    ) -> None:
        """Return when `ready()`.

        `in_transit`: data may be in transit, which only `ready` moves on, as MPI does, here or in
        another rank that this one follows. The link is idle while the wait sleeps longer than its
        buffers last.

        Raises DeadlineExceededError, naming the ranks in `absent()`, once the deadline plus `grace`
        seconds have passed since `start`, in seconds of `time.monotonic`: the beginning of a wait
        that this one continues. Logs a warning after a tenth of the deadline, once for one `start`.
        """
        start = time.monotonic() if start is None else start
        next_check = CHECK_SECONDS
        next_progress = _PROGRESS_SECONDS
        yield_seconds, longest = self._pauses(in_transit)
        while not ready():
            waited = time.monotonic() - start
            # Another thread may take Python's lock meanwhile, and keep it for milliseconds.
            if waited >= next_progress:
                next_progress = waited + _PROGRESS_SECONDS
                self.progress()
            if waited < yield_seconds:
                os.sched_yield()
                continue
            time.sleep(min(longest, waited / 20))
            if waited >= next_check:
                next_check = waited + CHECK_SECONDS
                self.check_alive()
            if self.limit is not None and waited >= self.limit and not ready():
                raise DeadlineExceededError("", tuple(absent()))
            if self.deadline is None or self.limit is not None:
                continue
            if self._warned != start and waited >= self.deadline / 10:
                self._warned = start
                log.warning("%s", self._text(f"has waited {waited:.3g} s for", absent()))
            if waited >= self.deadline + grace and not ready():
                raise self.exceeded(absent())

    def _pauses(self, in_transit: bool) -> tuple[float, float]:
        """For how long a wait yields before it sleeps, and its longest sleep, in seconds."""
        if not in_transit:
            return self._yield_seconds, _LONGEST_SLEEP
        if self._yield_seconds != _YIELD_SECONDS:
            return self._yield_seconds, _LONGEST_SLEEP_IN_TRANSIT
        return _YIELD_SECONDS_IN_TRANSIT, _LONGEST_SLEEP_IN_TRANSIT

    def exceeded(self, absent: dict[int, str]) -> DeadlineExceededError:
        """The error for a wait that exceeded the deadline because of the ranks in `absent`."""
        waited = f"waited the deadline of {self.deadline:g} s for"
        error = DeadlineExceededError(self._text(waited, absent), tuple(absent))
        self.before_raise(error)
        return error

    def renewed(self, error: DeadlineExceededError, absent: Absent) -> DeadlineExceededError:
        """The error of a wait that went on after it, with the ranks that are absent by now."""
        return error if self.limit is not None else self.exceeded(absent())

    def _text(self, waited: str, absent: dict[int, str]) -> str:
        numbers = self.world_ranks()
        named = [f"{_named(rank, numbers)}{note}" for rank, note in sorted(absent.items())]
        call = self.call
        return f"{call}, {waited} {', '.join(named) or 'other ranks'} ({self.current_line()})"

    def name(self, rank: int) -> str:
        """The rank, for messages; with its number in the world where that is another."""
        return _named(rank, self.world_ranks())

    def current_line(self) -> str:
        """File and line of the user's call that waits."""
        return self.line or calling_line()


def _named(rank: int, numbers: Sequence[int]) -> str:
    number = numbers[rank] if numbers else rank
    return f"rank {rank}" if number == rank else f"rank {rank} (world rank {number})"


def calling_line(frame: FrameType | None = None) -> str:
    """File and line of the innermost frame outside these packages, from `frame` outwards.

    Where there is none, as in a thread of torch that runs backward, that of the main thread.
    """
    frame = _outside(frame or sys._getframe(1))
    if is_inside(frame):
        frame = _outside(sys._current_frames()[threading.main_thread().ident or 0])
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _outside(frame: FrameType) -> FrameType:
    """The innermost frame outside these packages; the outermost one where there is none."""
    while frame.f_back and is_inside(frame):
        frame = frame.f_back
    return frame


def is_inside(frame: FrameType) -> bool:
    """Whether it runs code of these packages, or of a framework, and not the program's."""
    return frame.f_globals.get("__name__", "").split(".")[0] in (*_PACKAGES, *_PASSED_THROUGH)


def check_deadline(deadline: float | None) -> float | None:
    """`deadline` in seconds, or None for no deadline; ValueError or TypeError otherwise."""
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, Real):
        raise TypeError(f"deadline={deadline!r}: must be a number of seconds, or None")
    if not deadline > 0:
        raise ValueError(f"deadline={deadline!r}: must be a positive number of seconds, or None")
    return float(deadline)


def check_timeout(timeout: float | None) -> float | None:
    """`timeout` in seconds, or None for no timeout; TypeError otherwise."""
    if timeout is None:
        return None
    if not isinstance(timeout, Real):
        raise TypeError(f"timeout={timeout!r}: must be a number of seconds, or None")
    return float(timeout)
