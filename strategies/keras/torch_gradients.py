"""The mean of torch gradients over the ranks, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from collectives.torch.untraced import untraced_function
from strategies.keras.training import Training


@untraced_function
@torch.no_grad()
def reduce_gradients(
    training: Training, number: int, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """The gradients of the optimizer of that number, which hold the mean. Collective.

    A gradient that is None on some ranks counts as zeros there; one that is None on all stays None.
    """
    gradients = [
        _own(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)
    ]
    absent = sum(each is None for each in gradients)
    factor, absent_anywhere = training.exchange(number, training.weight, absent)
    if absent_anywhere:
        gradients = _filled(training, gradients, variables)
    positions = tuple(index for index, each in enumerate(gradients) if each is not None)
    present = [gradients[index] for index in positions]
    if factor == 0:
        torch._foreach_zero_(present)  # a product with 0 would keep NaN
    elif factor != 1 and present:
        torch._foreach_mul_(present, factor)
    if present:
        training.mean_into(present, present, number, positions)
    return list(gradients)


@untraced_function
@torch.no_grad()
def maxima(training: Training, tensors: Sequence[Any]) -> list[Any]:
    """The maxima over the ranks, element by element. Collective."""
    results: list[Any] = training.communicator.all_reduce_many(list(tensors), "max")
    return results


def _own(gradient: Any, variable: Any) -> Any:
    """The gradient in memory that no other one shares, nor the program that computed it."""
    if gradient is None or gradient is variable.value.grad:
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


def _filled(
    training: Training, gradients: Sequence[Any], variables: Sequence[Any]
) -> Sequence[Any]:
    """With zeros for gradients that another rank has."""
    present = np.array([each is not None for each in gradients], np.uint8)
    anywhere = training.communicator.all_reduce(present, "max")
    return [
        torch.zeros_like(variable.value) if gradient is None and needed else gradient
        for gradient, variable, needed in zip(gradients, variables, anywhere, strict=True)
    ]
