"""Tensors' memory as NumPy arrays, without a conversion at every call."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from collectives.arrays.tensors import from_torch
from collectives.caching import LRU
from collectives.reductions.reduction import Array


class TensorMemory:
    """Arrays over the memory of tensors, kept by address, dtype and shape.

    An array holds the address alone, so that it serves every tensor which lies there later. It may
    be used as long as the caller holds the tensor.
    """

    def __init__(self) -> None:
        self._known: LRU[Any, Array] = LRU()

    def array(self, tensor: Any) -> Array:
        """The tensor's elements, to be read and written; strided if the tensor is.

        Raises TypeError for a tensor without memory of its own on the CPU, ValueError for one whose
        elements differ from its memory.
        """
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                "the tensor is conjugated or negated when it is read: pass"
                " `tensor.resolve_conj().resolve_neg()`"
            )
        if not tensor.is_contiguous():
            return from_torch(tensor, "tensor")
        key = tensor.data_ptr(), tensor.dtype, tensor.shape
        found = self._known.get(key)
        return self._known.put(key, _array_over(tensor)) if found is None else found

    def flat(self, tensor: Any) -> Array:
        """The elements in C order as one dimension: a view if the tensor is contiguous."""
        return self.array(tensor).reshape(-1)

    def fill(self, tensor: Any, elements: Array) -> None:
        """Copy as many elements, in C order, into the tensor."""
        array = self.array(tensor)
        array[...] = elements.reshape(array.shape)


def _array_over(tensor: Any) -> Array:
    array = from_torch(tensor, "tensor")
    # `array` holds the tensor: a copy of it that does not is kept.
    if not array.nbytes:
        return np.empty(array.shape, array.dtype)
    memory = (ctypes.c_char * array.nbytes).from_address(tensor.data_ptr())
    return np.ndarray(array.shape, array.dtype, memoryview(memory))
