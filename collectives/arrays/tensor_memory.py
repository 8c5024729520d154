"""Tensors' memory as NumPy arrays, without a conversion at every call."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from collectives.arrays.tensors import from_torch, has_memory, is_lazy
from collectives.caching import LRU
from collectives.cuda.interface import is_torch
from collectives.reductions.reduction import Array


class TensorMemory:
    """Arrays over the memory of tensors, kept by address, dtype and shape.

    An array holds the address alone, so that it serves every tensor which lies there later. It may
    be used as long as the caller holds the tensor.
    """

    def __init__(self) -> None:
        self._known: LRU[Any, Array] = LRU()
        self._kinds: frozenset[type] = frozenset()

    def views(self, tensor: Any, out: Any) -> tuple[Array, Array | None] | None:
        """The memory of a tensor and of `out`, a tensor or None.

        None unless `plain` serves both and no gradient is recorded of them.
        """
        if type(tensor) not in self._kinds and not self._serves(tensor):
            return None
        if tensor.requires_grad or (source := self.plain(tensor)) is None:
            return None
        if out is None:
            return source, None
        if out is tensor:
            return source, source
        if type(out) not in self._kinds or out.requires_grad:
            return None
        target = self.plain(out)
        return None if target is None else (source, target)

    def _serves(self, array: Any) -> bool:
        """Whether it is of torch's own classes: those of others may have no memory."""
        if not self._kinds and is_torch(array):
            torch = sys.modules["torch"]
            self._kinds = frozenset({torch.Tensor, torch.nn.Parameter})
        return type(array) in self._kinds

    def plain(self, tensor: Any) -> Array | None:
        """The elements of a tensor of torch's own classes, to be read and written.

        None unless it is dense, contiguous, on the CPU, and its elements equal its memory.
        """
        if not tensor.is_cpu or tensor.is_sparse or tensor.is_conj() or tensor.is_neg():
            return None
        try:
            if not tensor.is_contiguous():
                return None
            address = tensor.data_ptr()
            key = address, tensor.dtype, tensor.shape
        except RuntimeError:  # of another layout, nested, or without memory
            return None
        found = self._known.get(key)
        if found is None and address:
            try:
                found = self._known.put(key, _array_over(tensor))
            except TypeError:  # a dtype that NumPy lacks, of which `from_torch` names the argument
                return None
        return found

    def array(self, tensor: Any) -> Array:
        """The tensor's elements, to be read and written; strided if the tensor is.

        Raises TypeError for a tensor without memory of its own on the CPU, ValueError for one whose
        elements differ from its memory.
        """
        refuse_lazy(tensor)
        found = self.plain(tensor)
        return from_torch(tensor, "tensor") if found is None else found

    def flat(self, tensor: Any) -> Array:
        """The elements in C order as one dimension: a view if the tensor is contiguous."""
        return self.array(tensor).reshape(-1)


def refuse_lazy(tensor: Any) -> None:
    """Raise ValueError for a tensor whose elements differ from its memory."""
    if is_lazy(tensor):
        raise ValueError(
            "the tensor is conjugated or negated when it is read: pass"
            " `tensor.resolve_conj().resolve_neg()`"
        )


def _array_over(tensor: Any) -> Array:
    array = from_torch(tensor, "tensor")
    # `array` holds the tensor: a copy of it that does not is kept.
    if not array.nbytes:
        return np.empty(array.shape, array.dtype)
    if not has_memory(tensor):
        raise TypeError("the array is of another tensor's memory")
    memory = (ctypes.c_char * array.nbytes).from_address(tensor.data_ptr())
    return np.ndarray(array.shape, array.dtype, memoryview(memory))
