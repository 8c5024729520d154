"""What is one call to the caller: no exception leaves the ranks out of step without a word.

An exception may come at any moment, as the handlers of signals raise them. Before the other ranks
can know of a call, it means that the call was not made. After that it ends the communicator, since
a caller that caught it and made the call again would meet the others' next one. What is harmless
even so is marked (`errors.in_step`); nothing else is.
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
        """`watchdog` looks after the calls that wait inside a library."""
        self.size, self.watchdog = size, watchdog
        self.lock = threading.RLock()
        self.call_check: CallCheck | None = None
        self.begun = 0
        """How many calls have gone to another thread, which makes them for this rank."""
        self.broken: BaseException | None = None
        """Why no call can be made any more."""

    def whole(self, action: Callable[..., Result], *arguments: Any) -> Result:
        """Do what the caller sees as one call, and before any other."""
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
            # An exception may also come when the lock has just been given back.
            if made:
                self.break_off(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Note what ended a call that the others may know of."""
        if not is_in_step(error):
            self.break_off(error)

    def unlock(self, error: BaseException, inside: bool, made: bool) -> None:
        """Note what came when the lock had just been taken, or just been given back.

        For who takes it by `acquire`: `inside` says whether it got to what it does under the lock,
        `made` whether it came to the end of that.
        """
        # Who waits for the lock and is interrupted has not got it; nobody waits for one's own.
        if not inside and self.lock._is_owned():  # type: ignore[attr-defined]
            self.lock.release()
        if made:
            self.break_off(error)

    def break_off(self, error: BaseException) -> None:
        """Make no further call: nobody knows what the other ranks have, or wait for."""
        if self.broken is not None:
            return
        # Its traceback keeps the arrays of the call, to which other ranks may still write.
        self.broken = error
        self.watchdog.stop()
        # Who waited in vain waited for the same ranks as the others, which say so themselves.
        waited = isinstance(error, DeadlineExceededError | RankFailedError)
        if self.call_check is not None and not waited:
            self.call_check.end()

    def refusal(self) -> UnusableError:
        """Why no call can be made any more."""
        known = isinstance(self.broken, RuntimeError)
        reason = self.broken if known else f"{self.broken!r} ended a call of this rank"
        return UnusableError(f"the communicator can't go on: {reason}")
