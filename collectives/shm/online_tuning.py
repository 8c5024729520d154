"""Online tuning: which data path is the fastest now, measured in the program's own calls.

A path's time depends on the machine's state, which changes while a program runs: the ranks' cores,
their other load, the locations of the arrays. Therefore each path is tried, the fastest is used,
and the others are tried again from time to time: the slower they were, the more rarely.

All ranks must use the same path. Therefore each rank publishes the time of its last call together
with the addresses of the next call's arrays, and all ranks record the longest of these times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Calls of a trial, where a caller names no other number; the last two count. The first one finds
# none of its memory in the caches.
_TRIES = 2
_CALLS_PER_REVIEW = 5
# One of so many counts, where the longest time of all ranks costs a message.
_CALLS_PER_AGREEMENT = 16
# The share of the time that trials of slower paths may take.
_TRIAL_SHARE = 0.02
_FEWEST_BETWEEN, _MOST_BETWEEN = 50, 20_000
# Another path replaces the present one, which has its memory in the caches, if it is 5 % faster.
_GAIN = 0.95
_WEIGHT_LESS, _WEIGHT_MORE = 1 / 2, 1 / 8


@dataclass
class _Known:
    """The time of a path, and the number of the call from which on it is tried again."""

    seconds: float = math.inf
    due: int = 0


class PathTimes:
    """The paths of one collective, for arrays of about one size."""

    def __init__(
        self, paths: Sequence[str], later: Mapping[str, int] | None = None, tries: int = _TRIES
    ) -> None:
        """`later`: the number of calls before which a path is not tried; `tries`: of a trial."""
        due, self._tries = later or {}, tries
        self._known = {path: _Known(due=due.get(path, 0)) for path in paths}
        self._path, self._in_row, self._previous = "", 0, math.inf
        self._best = math.inf
        """Seconds of the best path at the last change."""
        self._lost = 0.0
        """Seconds that trials have taken beyond it, in total."""
        self._calls = self._review = 0

    @property
    def seconds(self) -> dict[str, float]:
        """The time of each path that was tried."""
        known = self._known.items()
        return {path: each.seconds for path, each in known if each.seconds < math.inf}

    def run(self, run: Callable[[str], object], longest: Callable[[int], int]) -> str:
        """Make a call by the path that was the fastest lately, or by one that is tried; which.

        `longest` returns the longest of all ranks' nanoseconds. It costs a message, so that besides
        trials only some calls count.
        """
        path, start = self.choose(), time.perf_counter_ns()
        run(path)
        if self._in_row < self._tries or self._calls % _CALLS_PER_AGREEMENT == 0:
            self.learn(longest(time.perf_counter_ns() - start) / 1e9)
        return path

    def choose(self) -> str:
        """The path of the next call."""
        self._calls += 1
        if self._calls >= self._review:
            self._decide()
        return self._path

    def _decide(self) -> None:
        best = min(self._known, key=lambda path: self._known[path].seconds)
        present = self._known.get(self._path)
        if present is not None and 0 < self._in_row < self._tries:
            self._review = self._calls + 1
            return
        if present is not None and self._known[best].seconds > _GAIN * present.seconds:
            best = self._path
        others = [path for path in self._known if path not in (best, self._path)]
        chosen = next((path for path in others if self._may_try(self._known[path])), best)
        if chosen != self._path:
            tried = len(self.seconds) == len(self._known)
            self._best = self._least() if tried else math.inf
            if present is not None:
                present.due = self._calls + self._calls_until_trial(present)
            self._path, self._in_row = chosen, 0
        self._review = self._calls + (self._tries if self._in_row == 0 else _CALLS_PER_REVIEW)

    def _least(self) -> float:
        # Not by a generator, in whose end the exception of a signal's handler would be lost.
        return min([each.seconds for each in self._known.values()])

    def _may_try(self, known: _Known) -> bool:
        """Whether it is due, and the trials so far took no more than their share."""
        most = _TRIAL_SHARE * self._calls * self._least()
        return known.due < self._calls and self._lost <= most

    def _calls_until_trial(self, known: _Known) -> int:
        """Calls until a slower path is tried again."""
        loss = self._tries * (known.seconds / self._least() - 1)
        return int(min(max(loss / _TRIAL_SHARE, _FEWEST_BETWEEN), _MOST_BETWEEN))

    def learn(self, seconds: float) -> None:
        """Record the time of the call for which the last path was chosen."""
        known = self._known[self._path]
        self._in_row += 1
        if self._in_row == 1:
            known.seconds = seconds
        elif self._in_row <= self._tries:
            known.seconds = min(self._previous, seconds)
        else:
            # A delay says less about the path than a fast call.
            change = min(seconds, 2 * known.seconds) - known.seconds
            known.seconds += (_WEIGHT_LESS if change < 0 else _WEIGHT_MORE) * change
        if self._in_row <= self._tries:
            self._lost += max(0.0, seconds - self._best)
        self._previous = seconds


class OnlineTuning:
    """The times of the node's calls, equal on all its ranks."""

    def __init__(self) -> None:
        self.nanoseconds = 0
        """This rank's time of the last call."""
        self.last: PathTimes | None = None
        """The record of the last call, until the times of all ranks are known."""

    def learn(self, nanoseconds: int) -> None:
        """Record the longest time of any rank for the last call."""
        if self.last is not None:
            self.last.learn(nanoseconds / 1e9)
            self.last = None
