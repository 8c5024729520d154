"""The closure that is given to an optimizer: its gradients and the loss that it returns."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch

from collectives.communicator import Communicator

LOSS = "the loss of a closure"
"""What ranks compare, so that it is never taken for another call of the program."""


def then_reduced(
    closure: Callable[[], Any], wait: Callable[..., None], optimizer: Any, *, first_counts: bool
) -> Callable[[], Any]:
    """The closure, after which `wait` reduces what its backwards have left to be reduced.

    A call that makes no backward is allowed, since a line search computes losses alone; except the
    first call if `first_counts`.
    """

    def call() -> Any:
        nonlocal first_counts
        loss = closure()
        wait(optimizer, in_closure=not first_counts)
        first_counts = False
        return loss

    return call


def over_ranks(closure: Callable[[], Any], fold: Callable[[float], float]) -> Callable[[], Any]:
    """The closure, whose loss is folded over the ranks, as its gradients are.

    A line search decides by the loss, and LBFGS ends by it: with losses of their own the ranks
    would take different steps. A tensor remains one, with its graph; other numbers become floats.
    None remains what it is. Every rank must give a closure, or none.
    """

    def call() -> Any:
        loss = closure()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            folded = loss.clone()
            folded.data.fill_(fold(loss.item()))
            return folded
        if isinstance(loss, Real | np.generic | np.ndarray):
            number: Any = np.asarray(loss)
            return fold(float(number.item())) if number.size == 1 else loss
        return loss

    return call


def fold_number(comm: Communicator, number: float, op: str, weight: float | None) -> float:
    """A number's mean or sum over the ranks; with weights their weighted mean. Collective."""
    if comm.size == 1:
        return number
    if weight is None:
        return float(comm.all_reduce(np.array([number]), op, what=LOSS)[0])
    # A rank without data may have a loss of NaN.
    given = np.array([weight and number * weight, weight, number])
    total, weights, plain = comm.all_reduce(given, what=LOSS)
    return float(total / weights if weights else plain / comm.size)
