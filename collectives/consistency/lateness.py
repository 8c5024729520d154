"""Whether a leader may be late for a call, which another one may have withdrawn then.

The rules, and why they hold: `nodes_check`.
"""

from __future__ import annotations

import math
import time

from collectives.waiting.wait_policy import WaitPolicy

_LEASE = 1 / 8
"""As a part of the deadline."""
_GAPS = 1 / 8
"""The gaps of all rounds together, as a part of the deadline."""


class Lateness:
    """The times of one leader's calls, in seconds of `time.monotonic`."""

    def __init__(self, wait_policy: WaitPolicy, rounds: int) -> None:
        """`rounds`: of each call."""
        self._wait_policy, self._rounds = wait_policy, rounds
        self.began = -math.inf
        """When the last call began."""
        self._shortest = self._gap = math.inf
        """The shortest deadline of all ranks in the last call that had rounds; a part of it."""
        self._own: float | None = None
        """This leader's deadline in the last call."""
        self._settled: float | None = math.nan
        """The same, where it was the shortest and all went well; else NaN, which equals nothing."""

    def own_deadline(self) -> float:
        """This leader's deadline in the last call; infinite where there was none."""
        return math.inf if self._own is None else self._own

    def on_time(self) -> bool:
        """Begin a call like the last one: this leader's deadline is the shortest, it isn't late.

        False, and nothing has begun, where that isn't known.
        """
        now, wait_policy = time.monotonic(), self._wait_policy
        if (
            wait_policy.deadline == self._settled
            and now - self.began <= self._gap
            and wait_policy.limit is None
        ):
            self.began = now
            return True
        return False

    def begin(self) -> bool:
        """Begin a call; whether this leader may be late."""
        before, self.began = self.began, time.monotonic()
        self._own = self._wait_policy.deadline
        return (
            # A caller that limits the wait withdraws all the time.
            self._wait_policy.limit is not None
            or self.own_deadline() < self._shortest
            # A leader whose message has arrived may have waited for longer than its lease.
            or self.began - before > self._gap
        )

    def stopped(self, deadline: float | None = None) -> bool:
        """Whether this process stood still for so long that a leader may have withdrawn."""
        counts = self._shortest if deadline is None else deadline
        return time.monotonic() >= self.began + counts / 2

    def lease_is_over(self, deadline: float) -> bool:
        """Whether it is time for a vote."""
        return time.monotonic() >= self.began + deadline * _LEASE

    def settle(self, shortest: float) -> None:
        """Note the shortest deadline of all ranks, which all leaders know."""
        self._shortest, self._gap = shortest, shortest * _GAPS / self._rounds
        self._settled = self._own if shortest == self.own_deadline() else math.nan

    def unsettle(self) -> None:
        """After this `on_time` is False until `settle`."""
        self._settled = math.nan
