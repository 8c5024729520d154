"""Tensors of torch on a GPU as CuPy's arrays, and back; both share their memory."""

from __future__ import annotations

import sys
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from collectives.cuda.interface import DeviceArray
from collectives.reductions.reduction import BFLOAT16

# `isbuiltin` of the dtypes of ml_dtypes.
_REGISTERED = 2


class TensorArrays:
    """Arrays over the memory of tensors. No stream is ordered here."""

    def __init__(self) -> None:
        self._dtypes: dict[Any, np.dtype[Any] | None] = {}
        """NumPy's dtype for each of torch's; None where CuPy has none."""
        self._kinds: tuple[type, ...] = ()

    def array(self, tensor: Any) -> DeviceArray:
        """The memory of any dense tensor."""
        if (plain := self.plain(tensor)) is not None:
            return plain
        small = getattr(ml_dtypes, _name(tensor.dtype), None)
        if small is None:
            return cupy.asarray(tensor)
        torch = sys.modules["torch"]
        bits = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.uint8)
        return cupy.asarray(bits).view(small)

    def plain(self, tensor: Any) -> DeviceArray | None:
        """The memory of a contiguous tensor, in a fraction of the time; None for others."""
        torch = sys.modules["torch"]
        if not self._kinds:
            self._kinds = torch.Tensor, torch.nn.Parameter
        if type(tensor) not in self._kinds or tensor.layout is not torch.strided:
            return None
        if tensor.dtype not in self._dtypes:
            self._dtypes[tensor.dtype] = _dtype_of(tensor.dtype)
        dtype, address = self._dtypes[tensor.dtype], tensor.data_ptr()
        # A storage that was freed has no address.
        if dtype is None or not address or not tensor.is_contiguous():
            return None
        # It holds the tensor.
        memory = cupy.cuda.UnownedMemory(address, tensor.nbytes, tensor, tensor.get_device())
        return cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0))


def to_tensor(array: DeviceArray) -> Any:
    """A tensor over the memory of an array."""
    torch = sys.modules["torch"]
    if not is_registered(array.dtype):
        return torch.from_dlpack(array)
    bits = array.view(np.int16 if array.itemsize == 2 else np.uint8)
    return torch.from_dlpack(bits).view(getattr(torch, array.dtype.name))


def is_registered(dtype: np.dtype[Any]) -> bool:
    """Whether it is one of ml_dtypes, of which CuPy has bfloat16."""
    return dtype.isbuiltin == _REGISTERED


def _dtype_of(dtype: Any) -> np.dtype[Any] | None:
    try:
        found = np.dtype(_name(dtype))
    except TypeError:
        return None
    return None if is_registered(found) and found != BFLOAT16 else found


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
