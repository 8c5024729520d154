"""Scope of one call: an exception never leaves the ranks out of step undetected.

An exception may be raised at any point, for example by a signal handler. Before other ranks can
have seen the call, the call counts as not made. After that, the exception breaks the communicator,
because a caller that caught it and repeated the call would pair with the others' next call.
Exceptions that are harmless even then are marked (`errors.in_step`); no others are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.consistency.call_check import CallCheck
from collectives.errors import DeadlineExceededError, RankFailedError, UnusableError, is_in_step
from collectives.waiting.watchdog import Watchdog

Result = TypeVar("Result")


class CallScope:
    """One rank's calls on one communicator, one at a time."""

    def __init__(self, size: int, watchdog: Watchdog) -> None:
        """`watchdog` watches the calls that wait inside a library."""
        self.size, self.watchdog = size, watchdog
        self.lock = threading.RLock()
        self.call_check: CallCheck | None = None
        self.begun = 0
        """Number of calls submitted to another thread, which makes them for this rank."""
        self.broken: BaseException | None = None
        """The exception that broke the communicator, or None."""
        self.before_call: Callable[[], None] | None = None
        """Returns when calls that this thread began before in compiled programs are over.

        Called without the lock, for which such a call may wait.
        """

    def whole(
        self, action: Callable[..., Result], *arguments: Any, in_order: bool = True
    ) -> Result:
        """Run the action as one call of the user, exclusively.

        in_order: after the calls of compiled programs that this thread began before.
        """
        if in_order and self.before_call is not None:
            self.before_call()
        made = False
        try:
            with self.lock:
                call_check, begun = self.call_check, self.begun
                sequence = 0 if call_check is None else call_check.sequence
                try:
                    result = action(*arguments)
                    made = self.size > 1
                    return result
                except BaseException as error:
                    known = call_check is not None and call_check.sequence != sequence
                    if known or self.begun != begun:
                        self.leave(error)
                    raise
        except BaseException as error:
            # An exception may also be raised just after the lock was released.
            if made:
                self.break_off(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Handle an exception that ended a call which other ranks may have seen."""
        if not is_in_step(error):
            self.break_off(error)

    def unlock(self, error: BaseException, inside: bool, made: bool) -> None:
        """Handle an exception raised just after the lock was acquired or released.

        For callers of `acquire`: `inside` says whether the guarded code had started, `made` whether
        it had finished.
        """
        # A wait for the lock that is interrupted has not acquired it; an owned lock never waits.
        if not inside and self.is_within_call():
            self.lock.release()
        if made:
            self.break_off(error)

    def is_within_call(self) -> bool:
        """Whether this thread is in one."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]  # of RLock
        return owned

    def break_off(self, error: BaseException) -> None:
        """Refuse all further calls, because the state of the other ranks is unknown."""
        if self.broken is not None:
            return
        # The traceback keeps the arrays of the call alive, to which other ranks may still write.
        self.broken = error
        self.watchdog.stop()
        # The ranks that others wait for are the same on all ranks, which report them themselves.
        waited = isinstance(error, DeadlineExceededError | RankFailedError)
        if self.call_check is not None and not waited:
            self.call_check.end()

    def refusal(self) -> UnusableError:
        """The error of any further call."""
        known = isinstance(self.broken, RuntimeError)
        reason = self.broken if known else f"{self.broken!r} ended a call of this rank"
        return UnusableError(f"the communicator can't go on: {reason}")
