"""Reductions that NCCL can do on other elements than the given ones.

16-bit integers, which NCCL lacks, are widened. MIN and MAX of floating-point numbers, with which
NCCL loses a NaN that this package promises to keep, are found on integers of the same order: a
number's bits are one already where it is positive, and need all but the sign turned over where it
is negative. A NaN becomes the last of them, in the direction of the op, which reads as a NaN again.
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
    """How elements travel: in another dtype, as numbers or as places in their order."""

    dtype: np.dtype[Any]
    """On the way."""
    order: np.dtype[Any] | None
    """The integers of the elements' own size, where their order travels."""
    largest: int
    """The bits of infinity, or of the largest number: without the sign, a NaN's are more."""
    last: int
    """What a NaN becomes."""

    def there(self, array: DeviceArray) -> DeviceArray:
        """The elements as they travel, in memory of their own."""
        if self.order is None:
            return array.astype(self.dtype)
        bits = array.view(self.order)
        # By its bits: CuPy compares no 8-bit floats.
        missing = (bits & self.order.type(np.iinfo(self.order).max)) > self.largest
        places = _turned(bits)
        places *= ~missing
        places += missing.astype(self.order) * self.order.type(self.last)
        return places.astype(self.dtype, copy=False)

    def back(self, travelled: DeviceArray, target: DeviceArray) -> None:
        """Write the elements into `target`."""
        if self.order is None:
            target[...] = travelled.astype(target.dtype)
        else:
            places = _turned(travelled.astype(self.order, copy=False))
            target.view(self.order)[...] = places


def _turned(bits: DeviceArray) -> DeviceArray:
    """All bits but the sign turned over where the sign is set; its own inverse."""
    highest = bits.dtype.itemsize * 8 - 1
    return bits ^ ((bits >> highest) & bits.dtype.type(np.iinfo(bits.dtype).max))


@lru_cache(maxsize=256)
def conversion_of(op: ReduceOp, dtype: np.dtype[Any]) -> Conversion | None:
    """How elements of the dtype are reduced as others; None where they can't be."""
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
    number: Any = np.inf if infinite else 448.0  # the largest of that dtype
    return int(np.array(number, dtype).view(order))
