"""Gradients whose norm is limited: `clipnorm` and `global_clipnorm` of Keras's optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.core.indexed_slices import Gradient, IndexedSlices
from strategies.core.values import Array


def check_limits(clipnorm: Any, global_clipnorm: Any) -> None:
    """ValueError where both are given, or one is no number above 0."""
    if clipnorm is not None and global_clipnorm is not None:
        raise ValueError(f"{clipnorm=}, {global_clipnorm=}: only one of them can be given")
    for name, limit in (("clipnorm", clipnorm), ("global_clipnorm", global_clipnorm)):
        number = isinstance(limit, int | float | np.number) and not isinstance(limit, bool)
        if limit is not None and not (number and limit > 0):
            raise ValueError(f"{name}={limit!r}: must be a number above 0, or None")


def limits_as_text(clipnorm: float | None, global_clipnorm: float | None) -> str:
    """The limit that is given, to follow another text."""
    limits = {"clipnorm": clipnorm, "global_clipnorm": global_clipnorm}
    return "".join(f", {name}={limit}" for name, limit in limits.items() if limit is not None)


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
        return float(np.sum(np.square(np.abs(values.astype(wide)))))


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
        return np.asarray(array.astype(wide, copy=False) * wide.type(factor), dtype)
