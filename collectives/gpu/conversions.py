"""Reductions that NCCL performs on converted elements.

16-bit integers, which NCCL does not support, are widened. MIN and MAX of floating-point numbers,
with which NCCL loses NaNs that this package guarantees to keep, are performed on integers of the
same order: the bits of a positive number are such an integer, those of a negative number after all
bits but the sign are inverted. A NaN becomes the largest such integer for MAX and the smallest for
MIN, which converts back to a NaN.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from collectives.cuda.interface import DeviceArray
from collectives.reductions.reduction import ReduceOp

_WIDENED = {"int16": "int32", "uint16": "uint32"}
_FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class Conversion(NamedTuple):
    """Conversion of elements to another dtype, by value or by order."""

    dtype: np.dtype[Any]
    """The dtype that NCCL reduces."""
    order: np.dtype[Any] | None
    """The integer dtype of the elements' size, if the conversion is by order."""
    largest: int
    """Bits of infinity, or of the largest number; a NaN's bits without sign are larger."""
    last: int
    """The integer that stands for a NaN."""

    def convert(self, array: DeviceArray) -> DeviceArray:
        """The converted elements, in new memory."""
        if self.order is None:
            return array.astype(self.dtype)
        bits = array.view(self.order)
        # Compared as bits, because CuPy can't compare 8-bit floats.
        missing = (bits & self.order.type(np.iinfo(self.order).max)) > self.largest
        ordered = _ordered(bits)
        ordered *= ~missing
        ordered += missing.astype(self.order) * self.order.type(self.last)
        return ordered.astype(self.dtype, copy=False)

    def convert_back(self, converted: DeviceArray, target: DeviceArray) -> None:
        """Write the original elements into `target`."""
        if self.order is None:
            target[...] = converted.astype(target.dtype)
        else:
            bits = _ordered(converted.astype(self.order, copy=False))
            target.view(self.order)[...] = bits


def _ordered(bits: DeviceArray) -> DeviceArray:
    """Invert all bits but the sign where the sign is set; this is its own inverse."""
    highest = bits.dtype.itemsize * 8 - 1
    return bits ^ ((bits >> highest) & bits.dtype.type(np.iinfo(bits.dtype).max))


@lru_cache(maxsize=256)
def conversion_of(op: ReduceOp, dtype: np.dtype[Any]) -> Conversion | None:
    """The conversion for an op and dtype; None if there is none."""
    if dtype.name in _WIDENED:
        return Conversion(np.dtype(_WIDENED[dtype.name]), None, 0, 0)
    if op not in (ReduceOp.MIN, ReduceOp.MAX) or dtype.name not in _FLOATS:
        return None
    order = np.dtype(f"int{8 * dtype.itemsize}")
    limits = np.iinfo(order)
    last = limits.max if op is ReduceOp.MAX else limits.min
    wide = np.dtype(np.int32) if order.itemsize == 2 else order
    return Conversion(wide, order, _largest(dtype, order), int(last))


def _largest(dtype: np.dtype[Any], order: np.dtype[Any]) -> int:
    infinite = dtype.name != "float8_e4m3fn"
    number: Any = np.inf if infinite else 448.0  # the largest number of that dtype
    return int(np.array(number, dtype).view(order))
