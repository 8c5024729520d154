"""The pairs of gradients and variables that an optimizer is given, checked before any is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strategies import foreign
from strategies.core.contexts import has_strategy
from strategies.core.refusals import wrong_context
from strategies.core.values import as_array
from strategies.variables.indexed_slices import Gradient, IndexedSlices
from strategies.variables.variable import Variable

if TYPE_CHECKING:
    from strategies.core.strategy import Strategy


def checked_pairs(
    pairs: Sequence[tuple[int, tuple[Any, Any]]], strategy: Strategy
) -> tuple[list[Gradient], list[Variable]]:
    """The gradients that are there and their variables, in order; `pairs` has their positions.

    Raises as `Optimizer.apply_gradients`.
    """
    for position, (_, variable) in pairs:
        check_variable(variable, position)
    present = [(place, *pair) for place, pair in pairs if pair[0] is not None]
    if not present:
        raise ValueError("grads_and_vars has no gradient: every one is None, or there are none")
    for _, _, variable in present:
        _check_updatable(variable, strategy)
    return [_checked(*each) for each in present], [variable for _, _, variable in present]


def check_variable(variable: Any, position: int) -> None:
    """TypeError for anything else than a Variable, such as a parameter of torch."""
    if not isinstance(variable, Variable):
        raise foreign.refused_for_variable(variable, position) or TypeError(
            f"the variable at position {position} is a {type(variable).__name__}: must be a"
            " strategies.Variable"
        )


def told_absent(pairs: Sequence[tuple[int, tuple[Any, Variable]]]) -> str:
    """What ranks must have alike where gradients are None, and what to do where they don't."""
    absent = [f"{place} ({variable})" for place, (gradient, variable) in pairs if gradient is None]
    present = [str(variable.number) for _, (gradient, variable) in pairs if gradient is not None]
    return (
        f"apply_gradients with None at position {', '.join(absent)}, where a rank whose loss"
        " doesn't depend on a variable can give np.zeros(variable.shape), and with gradients of"
        f" variables {', '.join(present)}"
    )


def _check_updatable(variable: Variable, strategy: Strategy) -> None:
    if variable.strategy is not strategy:
        wrong = f"{variable} belongs to {variable.strategy}, but apply_gradients was called"
        if not has_strategy():
            raise wrong_context(f"{wrong} outside of its `run`: call it inside")
        raise wrong_context(
            f"{wrong} as a replica of another strategy, {strategy}: create variables in the scope"
            " of the strategy that runs"
        )
    if variable.dtype.kind in "biu":
        raise TypeError(f"{variable} holds integers: an optimizer needs floating-point numbers")


def _checked(position: int, gradient: Any, variable: Variable) -> Gradient:
    if isinstance(gradient, IndexedSlices):
        return gradient.fitted(variable.shape, variable.dtype, variable)
    try:
        array = as_array(gradient, "gradient", variable.dtype)
    except (RuntimeError, ValueError) as error:
        raise TypeError(
            f"the gradient at position {position}, a {type(gradient).__name__} for {variable},"
            f" can't be read as an array: {error}"
        ) from error
    if array.shape != variable.shape:
        raise ValueError(f"a gradient has shape {array.shape}: {variable} has {variable.shape}")
    return array
