"""Which way is the quickest now, learnt from what the last calls took.

What a way takes depends on the machine's state, which changes while a program runs: which cores
the ranks are on, what else uses them, where their arrays lie. So each way is tried, the quickest is
taken, and the others are tried again from time to time: the more rarely, the slower they were.

All ranks must take the same way. So each tells what the last call took it, with the places of the
next call's arrays, and all learn the longest of those times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A way is tried so many times in a row: the first call finds none of its memory in the caches.
_TRIES = 2
_CALLS_PER_REVIEW = 5
# Of all the time so much may go into trying what was slower.
_TRIAL_SHARE = 0.02
_FEWEST_BETWEEN, _MOST_BETWEEN = 50, 20_000
# So much less must another way take than the present one, which has its memory in the caches.
_GAIN = 0.95
_WEIGHT_LESS, _WEIGHT_MORE = 1 / 2, 1 / 8


@dataclass
class _Known:
    """What is known of a way."""

    seconds: float = math.inf
    due: int = 0
    """At which call it is to be tried again."""


class PathTimes:
    """The paths of one collective, for arrays of about one size."""

    def __init__(self, ways: Sequence[str]) -> None:
        self._known = {way: _Known() for way in ways}
        self._way, self._in_row = "", 0
        self._calls = self._review = 0

    @property
    def seconds(self) -> dict[str, float]:
        """What each way was found to take; those that weren't tried yet are missing."""
        known = self._known.items()
        return {way: each.seconds for way, each in known if each.seconds < math.inf}

    def choose(self) -> str:
        """The way for the next call."""
        self._calls += 1
        if self._calls >= self._review:
            self._decide()
        return self._way

    def _decide(self) -> None:
        best = min(self._known, key=lambda way: self._known[way].seconds)
        present = self._known.get(self._way)
        if present is not None and self._known[best].seconds > _GAIN * present.seconds:
            best = self._way
        others = [way for way in self._known if way not in (best, self._way)]
        chosen = next((way for way in others if self._known[way].due < self._calls), best)
        if chosen != self._way:
            if present is not None:
                present.due = self._calls + self._calls_until_trial(present)
            self._way, self._in_row = chosen, 0
        self._review = self._calls + (_TRIES if self._in_row == 0 else _CALLS_PER_REVIEW)

    def _calls_until_trial(self, known: _Known) -> int:
        """How many calls to wait before a way that was found to be slower is tried again."""
        best = min(each.seconds for each in self._known.values())
        loss = _TRIES * (known.seconds / best - 1)
        return int(min(max(loss / _TRIAL_SHARE, _FEWEST_BETWEEN), _MOST_BETWEEN))

    def learn(self, seconds: float) -> None:
        """Note what the call took for which a way was chosen last."""
        known = self._known[self._way]
        self._in_row += 1
        if self._in_row == 1:
            known.seconds = seconds
        elif self._in_row <= _TRIES:
            known.seconds = min(known.seconds, seconds)
        else:
            # A call that something held up says less than one that nothing did.
            change = min(seconds, 2 * known.seconds) - known.seconds
            known.seconds += (_WEIGHT_LESS if change < 0 else _WEIGHT_MORE) * change


class OnlineTuning:
    """What the calls of a node's ranks took, the same on all of them."""

    def __init__(self) -> None:
        self.nanoseconds = 0
        """What the last call took this rank."""
        self.last: PathTimes | None = None
        """That of the last call, until the times of all ranks are known."""

    def learn(self, nanoseconds: int) -> None:
        """Note the longest time that the last call took any rank."""
        if self.last is not None:
            self.last.learn(nanoseconds / 1e9)
            self.last = None
