"""Gradients that a program changes on some ranks before those of others are reduced.

A rank that makes no backward which reduces, for example because it has no samples, takes part in
the others' reduction when its optimizer steps. There the others have clipped the result already,
and this rank can't any more: the ranks would step by different gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives.torch.buckets import Member
from collectives.torch.reduction_round import GradientError


class ReducedGradients:
    """What the last reduction has left in `grad`."""

    def __init__(self, members: Sequence[Member]) -> None:
        """`members` have the gradients as reduced."""
        found = [(each, each.parameter.grad) for each in members]
        self._found = [(each, grad, grad._version) for each, grad in found if grad is not None]

    def refuse_changes(self, optimizer: Any) -> None:
        """GradientError, on this rank alone, where one of the optimizer's isn't what it was."""
        stepping = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for member, grad, version in self._found:
            if id(member.parameter) not in stepping:
                continue
            if member.parameter.grad is not grad or grad._version != version:
                raise GradientError(
                    f"{member.name}: its gradient was changed between backward and step, by"
                    " clipping or a gradient scaler, but ranks without a backward get their"
                    " gradients only in the step: on every rank, call synchronize(optimizer) of"
                    " the reducer, strategy.gradients_of(model), before gradients are changed"
                )
