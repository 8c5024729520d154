"""Which step an optimizer takes, as the ranks compare it."""

from __future__ import annotations

from dataclasses import dataclass

from collectives import Communicator, MismatchError
from collectives.consistency.uncaught import raised_on_all
from strategies.core.same_error import reports_after

STEP = "optimizer step "
"""The prefix of the texts that ranks compare."""


@dataclass
class StepSeries:
    """Steps whose numbers the ranks of a strategy agree on, since they agreed on the first one."""

    owner: object
    number: int
    """The series' own number, equal on all ranks."""
    next_step: int = 0
    action: str | None = None
    """What was equal on all ranks in the last step."""
    text: str = ""
    """The text by which they compared it."""


def compare_steps(error: MismatchError, communicator: Communicator, given: str) -> None:
    """After calls whose texts differed: return where all ranks would take the same step.

    Raises the same MismatchError on every rank elsewhere.
    """
    steps = reports_after(error, communicator, STEP, given, "apply_gradients")
    if len(set(steps)) > 1:
        calls = tuple(f"step {each}" for each in steps)
        differing = MismatchError("the ranks would take different steps", calls)
        raise raised_on_all(differing, communicator.rank) from None
