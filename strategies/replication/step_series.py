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
    first: int
    """That of the optimizer's first series: two optimizers may be alike in all else."""
    next_step: int = 0
    action: str | None = None
    """What was equal on all ranks in the last step."""
    text: str = ""
    """The text by which they compared it."""


def named_step(step: str, first: int | None) -> str:
    """The step of an optimizer whose first series has this number, None where it has none."""
    return step if first is None else f"{step} (optimizer {first})"


def compare_steps(
    error: MismatchError, communicator: Communicator, given: str, first: int | None
) -> int | None:
    """After calls whose texts differed: return where all ranks would take the same step.

    Returns the optimizer's first series, if a rank knows it: a copy of an optimizer has none.
    Raises the same MismatchError on every rank elsewhere.
    """
    steps = reports_after(error, communicator, STEP, (given, first), "apply_gradients")
    known = {each for _, each in steps if each is not None}
    if len({each for each, _ in steps}) > 1 or len(known) > 1:
        calls = tuple(f"step {named_step(*each)}" for each in steps)
        differing = MismatchError("the ranks would take different steps", calls)
        raise raised_on_all(differing, communicator.rank) from None
    return next(iter(known), None)
