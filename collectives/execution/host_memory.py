"""Host memory, as the executor of schedules uses it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from collectives.reductions.reduction import Action, Array, ReduceOp, reduction_for
from collectives.shm.addresses import address_of

_WORK_BYTES_KEPT = 1 << 26


class HostMemory:
    """Host memory, as NumPy arrays."""

    segment_bytes = 256 << 10
    address = staticmethod(address_of)

    def __init__(self) -> None:
        self._work = np.empty(0, np.uint8)

    def work(self, length: int, dtype: np.dtype[Any]) -> Array:
        """The same memory for each call, unless very much is needed."""
        nbytes = length * dtype.itemsize
        if nbytes > _WORK_BYTES_KEPT:
            return np.empty(length, dtype)
        if nbytes > self._work.nbytes:
            self._work = np.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        return self._work[:nbytes].view(dtype)

    def empty(self, length: int, dtype: np.dtype[Any]) -> Array:
        """New uninitialised memory."""
        return np.empty(length, dtype)

    def at(self, address: int, length: int, dtype: np.dtype[Any]) -> Array:
        """An array over the memory."""
        if not length:
            return np.empty(0, dtype)
        return np.asarray(_AddressRange(address, length * dtype.itemsize)).view(dtype)

    def message(self, array: Array) -> memoryview:
        """A view of the bytes."""
        return array.view(np.uint8).data

    def copy(self, origin: Array, copied: Array) -> Action:
        """By NumPy."""
        return partial(np.copyto, copied, origin)

    def fold(self, op: ReduceOp, first: Array, second: Array, out: Array) -> Action:
        """By the fastest fold for the dtype."""
        return reduction_for(op, out.dtype).bind(first, second, out)


class _AddressRange:
    """Memory at an address, in NumPy's array interface, without ownership."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
