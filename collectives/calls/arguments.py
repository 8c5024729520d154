"""Rows along an axis, and arrays as calls take and return them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from collectives.arrays.kinds import (
    Output,
    check_same_memory,
    empty,
    flat,
    given_output,
    like,
    new_output,
    packed,
)
from collectives.consistency.signature import dtype_name
from collectives.errors import DtypeMismatchError, check_integer, in_step
from collectives.reductions.reduction import Array
from collectives.schedules.schedule import split_lengths


@lru_cache(maxsize=256)
def split_rows(count: int, size: int) -> tuple[int, ...]:
    """How many rows each rank gets, as `numpy.array_split` deals them out."""
    return tuple(split_lengths(count, size).tolist())


def axis_of(axis: Any) -> int:
    """The axis as an int; TypeError for what is none."""
    return check_integer("axis", axis)


class Rows:
    """An array seen as rows along one axis, which comes first in `flat`. 0-d counts as one row."""

    def __init__(self, array: Array, axis: Any) -> None:
        if not array.ndim:
            array = array.reshape(1)
        self.axis = axis_of(axis)
        if not -array.ndim <= self.axis < array.ndim:
            raise ValueError(
                f"axis={axis!r}: array has {array.ndim} axes,"
                f" so it must be from {-array.ndim} to {array.ndim - 1}"
            )
        self.axis %= array.ndim
        moved = np.moveaxis(array, self.axis, 0) if self.axis else array
        self.flat = flat(moved)
        self.count, self.rest = moved.shape[0], moved.shape[1:]
        self.dtype = array.dtype

    @property
    def elements(self) -> int:
        """The elements of one row."""
        return math.prod(self.rest)

    def shape(self, count: int) -> tuple[int, ...]:
        """The shape of an array of the same kind with `count` rows."""
        return (*self.rest[: self.axis], count, *self.rest[self.axis :])

    def output(self, out: Any, count: int, dtype: np.dtype[Any], original: Any) -> Output:
        """Where `count` flat rows go: into `out` if it is given, else into a new array."""
        shape = self.shape(count)
        if self.axis == 0:
            if out is None:
                return new_output(shape, dtype, original)
            output = given_output(out, shape, dtype)
            check_same_memory(self.flat, output)
            return output
        buffer = empty(count * self.elements, dtype, self.flat)
        if out is None:
            convert = like(original)
            return Output(buffer, lambda: convert(self.array(buffer, count)))
        view = given_output(out, shape, dtype)
        check_same_memory(self.flat, view)

        def deliver() -> Any:
            view.buffer.reshape(shape)[...] = self.array(buffer, count)
            return view.deliver()

        return Output(buffer, deliver)

    def array(self, rows: Array, count: int) -> Array:
        """`count` flat rows of the same kind as a contiguous array, with the axis in its place."""
        if not self.axis:
            return rows.reshape(count, *self.rest)
        return packed(np.moveaxis(rows.reshape(count, *self.rest), 0, self.axis))


def contiguous_apart(array: Array, target: Array | None) -> Array:
    """The elements in C order, in memory of their own where they may overlap with the target."""
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        return array.flatten()
    if target is not None and (
        array is target
        or (
            (array.base is not None or target.base is not None)
            and np.may_share_memory(array, target)
        )
    ):
        return array.flatten()
    return array.reshape(-1)


def received_as(convert: Callable[[Array], Any], array: Array, call: str) -> Any:
    """What was received as an array of another library; DtypeMismatchError if it lacks the dtype.

    All data of the call have moved.
    """
    try:
        result = convert(array)
    except (TypeError, ValueError) as error:
        problem = str(error)
    else:
        # JAX returns narrower numbers.
        kept = getattr(result, "dtype", None)
        if not isinstance(kept, np.dtype) or kept == array.dtype:
            return result
        problem = f"it would become {dtype_name(kept)}"
    text = f"{call} sent {dtype_name(array.dtype)}{list(array.shape)}"
    raise in_step(DtypeMismatchError(f"{text}: not in the library of this rank's array: {problem}"))
