"""The pairs of gradients and variables that an optimizer is given, checked before any is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.core.indexed_slices import Gradient, IndexedSlices
from strategies.core.same_error import wrong_context
from strategies.core.values import as_array
from strategies.foreign.registry import refused_for_variable
from strategies.replication.contexts import has_strategy
from strategies.replication.replication import Replication
from strategies.variables.variable import Variable

Pairs = Sequence[tuple[Any, Any]]


def checked_pairs(pairs: Pairs, strategy: Replication) -> tuple[list[Gradient], list[Variable]]:
    """The gradients that aren't None and their variables, in order.

    Raises as `Optimizer.apply_gradients`.
    """
    for position, (_, variable) in enumerate(pairs):
        if type(variable) is not Variable:
            check_variable(variable, position)
    gradients: list[Gradient] = []
    variables: list[Variable] = []
    for position, (gradient, variable) in enumerate(pairs):
        if gradient is None:
            continue
        if variable.strategy is not strategy:
            raise _wrong_strategy(variable, strategy)
        kept = variable.storage
        if kept.dtype.kind in "biu":
            raise TypeError(f"{variable} holds integers: an optimizer needs floating-point numbers")
        plain = type(gradient) is np.ndarray
        if not (plain and gradient.dtype == kept.dtype and gradient.shape == kept.shape):
            gradient = _fitted(gradient, variable, position)
        gradients.append(gradient)
        variables.append(variable)
    if not variables:
        raise ValueError("grads_and_vars has no gradient: every one is None, or there are none")
    return gradients, variables


def check_variable(variable: Any, position: int) -> None:
    """TypeError for anything else than a Variable, such as a parameter of torch."""
    if not isinstance(variable, Variable):
        raise refused_for_variable(variable, position) or TypeError(
            f"the variable at position {position} is a {type(variable).__name__}: must be a"
            " strategies.Variable"
        )


def absent_text(pairs: Pairs) -> str:
    """What must be equal on all ranks where gradients are None, with the remedy."""
    absent = [f"{n} ({variable})" for n, (grad, variable) in enumerate(pairs) if grad is None]
    present = [str(variable.number) for grad, variable in pairs if grad is not None]
    return (
        f"apply_gradients with None at position {', '.join(absent)}, where a rank whose loss"
        " doesn't depend on a variable can give np.zeros(variable.shape), and with gradients of"
        f" variables {', '.join(present)}"
    )


def _wrong_strategy(variable: Variable, strategy: Replication) -> RuntimeError:
    wrong = f"{variable} belongs to {variable.strategy}, but apply_gradients was called"
    if not has_strategy():
        return wrong_context(f"{wrong} outside of its `run`: call it inside")
    return wrong_context(
        f"{wrong} as a replica of another strategy, {strategy}: create variables in the scope"
        " of the strategy that runs"
    )


def _fitted(gradient: Any, variable: Variable, position: int) -> Gradient:
    """The gradient in the variable's dtype."""
    dtype, shape = variable.dtype, variable.shape
    if isinstance(gradient, IndexedSlices):
        return gradient.fitted(shape, dtype, variable)
    try:
        array = as_array(gradient, "gradient", dtype)
    except (RuntimeError, ValueError) as error:
        raise TypeError(
            f"the gradient at position {position}, a {type(gradient).__name__} for {variable},"
            f" can't be read as an array: {error}"
        ) from error
    if array.shape != shape:
        raise ValueError(f"a gradient has shape {array.shape}: {variable} has {shape}")
    return array
