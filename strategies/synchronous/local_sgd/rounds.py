"""The length of rounds: the steps from one averaging to the next."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from collectives import Communicator
from strategies.core.same_error import refuse_differences
from strategies.core.values import whole_number
from strategies.optimizers import Optimizer

_GROWTH = 2


class Rounds:
    """How many steps there are from one averaging to the next: the same number on all ranks."""

    def __init__(self, every: int | None, seconds: float | None) -> None:
        """So many steps, or as many as take about so many seconds: one at first."""
        self._every, self._seconds = every, seconds
        self._taken = 0
        self.length = every or 1
        """The present round's number of steps."""
        self._began = time.perf_counter()

    def step(self, count: int = 1) -> bool:
        """Count steps; whether the round ends with them."""
        self._taken += count
        return self._taken >= self.length

    def proposal(self) -> int:
        """The next round's steps as this rank would have them; 0 where it took none yet."""
        if self._seconds is None or not self._taken:
            return self._every or 0
        rate = self._taken / max(time.perf_counter() - self._began, 1e-9)
        # A rate of few steps is not reliable.
        return max(1, int(min(self._seconds * rate, _GROWTH * self.length)))

    def begin(self, proposals: Sequence[int]) -> None:
        """A new round, of the slowest rank's proposal."""
        self.length = min((each for each in proposals if each), default=self.length)
        self._taken = 0
        self._began = time.perf_counter()


def agreed_rounds(communicator: Communicator, every: Any, seconds: Any, outer: Any) -> Rounds:
    """The rounds that a strategy's arguments give. Collective.

    Raises ValueError unless one of `every` and `seconds` is given and possible, and on every rank
    where the ranks' arguments differ; TypeError for an outer optimizer that is none.
    """
    kind = f"the class {outer.__name__}" if isinstance(outer, type) else f"a {type(outer).__name__}"
    # Not the object's own text, which would differ by its address.
    settings = outer.settings if isinstance(outer, Optimizer) else outer and kind
    # Before they are checked, so that all ranks raise where one has a wrong argument.
    refuse_differences(
        communicator,
        "LocalSGDStrategy: the ranks' arguments differ",
        f"sync_every={every!r}, sync_seconds={seconds!r}, outer_optimizer={settings!r}",
    )
    rounds = Rounds(*_checked(every, seconds))
    if outer is not None and not isinstance(outer, Optimizer):
        raise TypeError(f"outer_optimizer is {kind}: must be one of strategies.optimizers")
    return rounds


def _checked(every: Any, seconds: Any) -> tuple[int | None, float | None]:
    if (every is None) == (seconds is None):
        raise ValueError(
            f"sync_every={every!r}, sync_seconds={seconds!r}: exactly one of them must be given"
        )
    if every is None:
        if not 0 < (duration := float(seconds)) < math.inf:
            raise ValueError(f"sync_seconds={seconds!r}: must be above 0, and finite")
        return None, duration
    return whole_number("sync_every", every, 1), None
