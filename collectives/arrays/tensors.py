"""Conversion of torch tensors on the CPU to NumPy, and back; torch must have been imported.

`Tensor.numpy()` makes a tensor's storage unresizable for ever, which breaks code that frees the
memory of a tensor and allocates it again, such as FSDP. Here NumPy receives the memory's address,
and the array keeps the tensor alive.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from collectives.reductions.reduction import Array

_BOTH = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
# Dtypes that NumPy supports only through ml_dtypes.
_SMALL_FLOATS = (
    *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
)


class _Memory:
    """A tensor's memory through NumPy's array interface."""

    def __init__(self, tensor: Any, address: int, itemsize: int, kind: str) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * itemsize for step in tensor.stride()),
            "typestr": kind,
        }


def from_torch(tensor: Any, argument: str) -> Array:
    """A tensor as a NumPy array; shares its memory unless it is lazily conjugated or negated.

    The result of one of torch's functional collectives is awaited.

    Raises TypeError for a tensor on another device than the CPU, or without memory that holds its
    elements: sparse, nested, quantized, or of a class that stores them elsewhere.
    """
    torch = sys.modules["torch"]
    if tensor.is_cuda:
        raise TypeError(f"{argument} is a tensor on {tensor.device}: must lie on the CPU here")
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{argument} is a tensor on {tensor.device}, another device than the CPU or an NVIDIA"
            " GPU: such devices are not supported"
        )
    dtype = _dtypes().get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"{argument} is a tensor of {tensor.dtype} and {tensor.layout}"
            f"{', nested' if tensor.is_nested else ''}: NumPy has no equivalent"
        )
    tensor = awaited(tensor).detach().resolve_conj().resolve_neg()
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    if not has_memory(tensor):
        raise TypeError(
            f"{argument} is a {type(tensor).__name__}, which has no memory of its own: give the"
            " tensor that it wraps, such as `to_local()` of a DTensor"
        )
    known = dtype.name not in _SMALL_FLOATS
    kind = dtype.str if known else f"|V{dtype.itemsize}"
    array: Array = np.asarray(_Memory(tensor, tensor.data_ptr(), dtype.itemsize, kind))
    return array if known else array.view(dtype)


def has_memory(tensor: Any) -> bool:
    """Whether a tensor with elements holds them; those of classes that wrap others don't."""
    # Their addresses are offsets from 0.
    return bool(tensor.data_ptr() != tensor.storage_offset() * tensor.element_size())


def awaited(tensor: Any) -> Any:
    """The tensor that an AsyncCollectiveTensor wraps, once it is complete; others as they are."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def is_lazy(tensor: Any) -> bool:
    """Whether torch conjugates or negates the tensor's elements when it is read."""
    return bool(tensor.is_conj() or tensor.is_neg())


def to_torch(array: Array) -> Any:
    """A tensor that shares the array's memory; a copy of an array in foreign byte order."""
    torch = sys.modules["torch"]
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    name = array.dtype.name
    if name not in _SMALL_FLOATS:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, name))


@lru_cache(maxsize=1)
def _dtypes() -> dict[Any, np.dtype[Any]]:
    torch = sys.modules["torch"]
    found = {getattr(torch, name): np.dtype(name) for name in _BOTH if hasattr(torch, name)}
    for name in _SMALL_FLOATS:
        if hasattr(torch, name):
            found[getattr(torch, name)] = np.dtype(getattr(ml_dtypes, name))
    return found


def refuse_lost_gradient(array: Any, argument: str) -> None:
    """Raise ValueError for a tensor that requires grad, whose gradient the result would lose."""
    if _is_differentiated(array):
        raise ValueError(
            f"{argument} is a tensor that requires grad, and the result would have no gradient:"
            f" call `collectives.torch.all_reduce`, or another differentiable function of that"
            f" module, or pass {argument}.detach(), or make the call within"
            " `with torch.no_grad():`"
        )


def refuse_false_gradient(array: Any, argument: str) -> None:
    """Raise ValueError for a tensor whose gradient would be wrong once it is overwritten.

    A leaf, such as a parameter, may be overwritten: its gradient is computed later.
    """
    if _is_differentiated(array) and not array.is_leaf:
        raise ValueError(
            f"{argument} is a tensor that was computed from others that require grad: to write into"
            f" it would falsify their gradients. Pass {argument}.detach(), or make the call within"
            " `with torch.no_grad():`"
        )


def _is_differentiated(array: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return False
    return bool(array.requires_grad and torch.is_grad_enabled())
