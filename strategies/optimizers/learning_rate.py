"""The learning rate: a number, or a function of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Rate: TypeAlias = float | Callable[[int], float]


class LearningRate:
    """What was given as learning rate, and its value at a step."""

    def __init__(self, given: Rate) -> None:
        self.given = given
        self._known: tuple[int, float] | None = None

    @property
    def scheduled(self) -> bool:
        """Whether it is a function of the step."""
        return callable(self.given)

    def at(self, step: int) -> Any:
        """The rate of a step, counted from 0; TypeError where the function gives no number."""
        if not callable(self.given):
            return self.given
        if self._known is None or self._known[0] != step:
            self._known = step, _number(self.given(step), step)
        return self._known[1]

    def forget(self) -> None:
        """Call the function again, also for the step that it was called for last."""
        self._known = None


def _number(value: Any, step: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        text = f"learning_rate gave a {kind} for step {step}: must be a number"
        raise TypeError(text) from None
