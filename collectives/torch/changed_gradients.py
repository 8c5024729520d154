"""Gradients that a program changes on some ranks before those of others are reduced.

A rank that makes no backward, for example because it has no samples, takes part in the others'
reduction when its optimizer steps. There the others have clipped the result already, and this rank
can't any more: the ranks would step by different gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.torch.buckets import Member
from collectives.torch.reduction_round import GradientError


class ReducedGradients:
    """What the last reduction has left in `grad`."""

    def __init__(self, members: Sequence[Member]) -> None:
        """`members` have the gradients as reduced."""
        found = [(each, each.parameter.grad) for each in members]
        self._found = [(each, grad, grad._version) for each, grad in found if grad is not None]

    def refuse_changes(self) -> None:
        """GradientError, on this rank alone, for a gradient that isn't what it was."""
        for member, grad, version in self._found:
            if member.parameter.grad is not grad or grad._version != version:
                raise GradientError(
                    f"{member.name}: its gradient was changed between backward and step, by"
                    " clipping or a gradient scaler, and other ranks, which made no backward, get"
                    " theirs in the step alone: call wait(optimizer) of the reducer, which is"
                    " strategy.gradients_of(model), on every rank before gradients are changed"
                )
