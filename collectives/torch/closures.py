"""The loss that a closure returns to the optimizer that calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from collectives.communicator import Communicator


def over_ranks(closure: Callable[[], Any], fold: Callable[[float], float]) -> Callable[[], Any]:
    """The closure, whose loss is folded over the ranks, as its gradients are.

    A line search decides by the loss, and LBFGS ends by it: with losses of their own the ranks
    would take different steps. A tensor remains one, with its graph. What is no number, such as
    None, remains what it is.
    """

    def call() -> Any:
        loss = closure()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            folded = loss.clone()
            folded.data.fill_(fold(loss.item()))
            return folded
        return fold(float(loss)) if isinstance(loss, int | float) else loss

    return call


def fold_number(comm: Communicator, number: float, op: str, weight: float | None) -> float:
    """A number's mean or sum over the ranks; with weights their weighted mean. Collective."""
    if comm.size == 1:
        return number
    if weight is None:
        return float(comm.all_reduce(np.array([number]), op)[0])
    # A rank without data may have a loss of NaN.
    total, weights = comm.all_reduce(np.array([weight and number * weight, weight]))
    return float(total / weights)
