"""Gradients of a step: checked with their variables before any is sent, and limited in their norm.

`clipnorm` and `global_clipnorm` are those of Keras's optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.core.indexed_slices import Gradient, IndexedSlices
from strategies.core.values import Array, as_array, cast, on_host
from strategies.foreign.registry import refused_for_variable
from strategies.replication.contexts import has_strategy
from strategies.replication.replication import Replication
from strategies.variables.variable import Variable

Pairs = Sequence[tuple[Any, Any]]


def checked_pairs(pairs: Pairs, strategy: Replication) -> tuple[list[Gradient], list[Variable]]:
    """The gradients that aren't None and their variables, in order.

    Raises as `Optimizer.apply_gradients`.
    """
    for position, pair in enumerate(pairs):
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            raise TypeError(
                f"grads_and_vars has a {type(pair).__name__} at position {position}: must be a pair"
                " (gradient, variable)"
            )
        _, variable = pair
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
        plain = type(gradient) is np.ndarray and not kept.on_gpu
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


def check_variables(variables: Sequence[Any]) -> None:
    """ValueError where there are none, TypeError for what takes no gradient in host memory."""
    if not variables:
        raise ValueError("variables has no variable")
    for position, variable in enumerate(variables):
        check_variable(variable, position)
        if variable.storage.on_gpu:
            raise TypeError(f"{variable} lies on a GPU: give its gradient as an array there")


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
    kind = type(variable.strategy).__name__
    wrong = f"{variable} belongs to a {kind}, but apply_gradients was called"
    if not has_strategy():
        return RuntimeError(f"{wrong} outside of its `run`: call it inside")
    return RuntimeError(
        f"{wrong} as a replica of another strategy, a {type(strategy).__name__}: create variables"
        " in the scope of the strategy that runs"
    )


_UNFIT = frozenset("OSUMm")
"""Kinds of dtypes that are no numbers."""


def _fitted(gradient: Any, variable: Variable, position: int) -> Gradient:
    """The gradient in the variable's dtype."""
    dtype, shape = variable.dtype, variable.shape
    gpu = variable.storage.on_gpu
    numbers = gradient.values if isinstance(gradient, IndexedSlices) else gradient
    given = getattr(numbers, "dtype", None)
    kind = getattr(given, "kind", "")
    is_complex = kind == "c" or getattr(given, "is_complex", False)  # torch's, TensorFlow's
    if kind in _UNFIT or (is_complex and dtype.kind != "c"):
        raise TypeError(
            f"the gradient at position {position} is of {given}, and {variable} of {dtype}"
        )
    if isinstance(gradient, IndexedSlices):
        if gpu:
            raise TypeError(f"{variable} lies on a GPU: its gradient can't be IndexedSlices")
        return gradient.fitted(shape, dtype, variable)
    try:
        array = as_array(gradient, "gradient", dtype, gpu=gpu)
    except (RuntimeError, ValueError) as error:
        raise TypeError(
            f"the gradient at position {position}, a {type(gradient).__name__} for {variable},"
            f" can't be read as an array: {error}"
        ) from error
    if array.shape != shape:
        raise ValueError(f"a gradient has shape {array.shape}: {variable} has {shape}")
    return array


def check_limits(clipnorm: Any, global_clipnorm: Any) -> None:
    """ValueError where both are given, or one is no number above 0."""
    if clipnorm is not None and global_clipnorm is not None:
        raise ValueError(f"{clipnorm=}, {global_clipnorm=}: only one of them can be given")
    for name, limit in (("clipnorm", clipnorm), ("global_clipnorm", global_clipnorm)):
        number = isinstance(limit, int | float | np.number) and not isinstance(limit, bool)
        if limit is not None and not (number and limit > 0):
            raise ValueError(f"{name}={limit!r}: must be a number above 0, or None")


def clip(
    gradients: Sequence[Gradient], clipnorm: float | None, global_clipnorm: float | None
) -> list[Gradient]:
    """The gradients, those that are too long scaled to the limit; none is overwritten.

    The norm is the root of the sum of squares, in float64: of each gradient by itself under
    `clipnorm`, of all together under `global_clipnorm`. Duplicate rows of slices are added up
    first, so that slices are clipped as the array they stand for. (Keras takes the norm of the
    duplicates, which is another number.) NaN and infinity are not hidden.
    """
    if clipnorm is None and global_clipnorm is None:
        return list(gradients)
    summed = [each.summed() if isinstance(each, IndexedSlices) else each for each in gradients]
    squares = list(map(_square, summed))
    if clipnorm is not None:
        return [
            _scaled(each, _factor(math.sqrt(square), clipnorm))
            for each, square in zip(summed, squares, strict=True)
        ]
    assert global_clipnorm is not None
    norm = math.sqrt(sum(squares))
    # An infinite gradient would make the others zero.
    factor = math.nan if math.isinf(norm) else _factor(norm, global_clipnorm)
    return [_scaled(each, factor) for each in summed]


def _square(gradient: Gradient) -> float:
    """The sum of squares: by additions alone, whose order is the same on every machine."""
    values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
    wide = np.complex128 if values.dtype.kind == "c" else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        return float(on_host(np.square(np.abs(values.astype(wide))).sum()))


def _factor(norm: float, limit: float) -> float:
    return 1.0 if norm <= limit else limit / norm


def _scaled(gradient: Gradient, factor: float) -> Gradient:
    if factor == 1:
        return gradient
    if isinstance(gradient, IndexedSlices):
        values = _times(gradient.values, factor)
        return IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return _times(gradient, factor)


def _times(array: Array, factor: float) -> Array:
    dtype = array.dtype
    wide = np.dtype(np.float32) if dtype.itemsize <= 2 else dtype
    with np.errstate(invalid="ignore"):
        return cast(array.astype(wide, copy=False) * wide.type(factor), dtype)
