"""Arrays of every kind, as NumPy sees them, and back.

Taken: NumPy arrays and scalars; torch tensors, JAX arrays and others on the CPU that speak DLPack;
objects with the buffer protocol; numbers and lists. A torch tensor comes back as one, an array with
an array-API namespace as one of that namespace, everything else as NumPy.

An array on a GPU (CuPy's, torch's, whatever speaks `__cuda_array_interface__` or DLPack) stays
there: it is seen as a device array, which can do what is used of NumPy's arrays here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.tensors import from_torch, refuse_false_gradient, to_torch
from collectives.cuda.interface import DLPACK_GPU, is_torch
from collectives.cuda.runtime import cuda, on_gpu
from collectives.reductions.reduction import Array

# kDLCPU, and kDLCUDAHost: memory of the host that is pinned.
_DLPACK_CPU = (1, 3)


def to_array(array: Any, argument: str = "array") -> Array:
    """`array` as NumPy, or as a device array, sharing its memory wherever that is possible.

    Raises TypeError as `to_numpy`, BackendUnavailableError for one on a GPU where CuPy is missing.
    """
    if not on_gpu(array):
        return to_numpy(array, argument)
    converted: Array = cuda().array(array)
    _check_dtype(converted.dtype, argument)
    _check_current(converted, argument)
    return converted


def _check_current(array: Array, argument: str) -> None:
    """TypeError for an array of another GPU than that on which everything here is done."""
    gpus = cuda()
    number, current = gpus.device_of(array), gpus.current_device()
    if number != current:
        commands = f"`cupy.cuda.Device({number}).use()` or `torch.cuda.set_device({number})`"
        raise TypeError(
            f"{argument} lies on GPU {number}, and the current one is {current}: make its own"
            f" current first ({commands})"
        )


def is_device(array: Any) -> bool:
    """Whether it is a device array, of those that `to_array` returns."""
    return type(array) is not np.ndarray


def to_numpy(array: Any, argument: str = "array") -> Array:
    """`array` as NumPy, sharing its memory wherever that is possible.

    Raises TypeError where it holds Python objects or lies on another device than the CPU.
    """
    if type(array) is np.ndarray:
        converted = array
    elif isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{argument} is a masked array, whose mask would be lost: send both parts")
    elif isinstance(array, np.ndarray):
        converted = array.view(np.ndarray)
    elif is_torch(array):
        converted = from_torch(array, argument)
    elif array is None:
        raise TypeError(
            f"{argument} is None: must be an array. Where it is the gradient of a parameter that"
            " took no part, give zeros in its place, or leave it out on every rank"
            " (`torch.zeros_like(p) if p.grad is None else p.grad`)"
        )
    elif hasattr(array, "__dlpack_device__"):
        _check_on_cpu(array.__dlpack_device__()[0], array, argument)
        converted = _from_dlpack(array)
    else:
        converted = _from_buffer(array)
    _check_dtype(converted.dtype, argument)
    return converted


def _check_dtype(dtype: np.dtype[Any], argument: str) -> None:
    if dtype.hasobject or dtype.kind not in "biufcV" or not dtype.itemsize:
        raise TypeError(
            f"{argument} of dtype {dtype}: only fixed-size numbers can be sent as arrays;"
            " broadcast_object and all_gather_object take anything that pickles"
        )


def _from_dlpack(array: Any) -> Array:
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError):
        # NumPy's importer knows neither bfloat16 nor, in older versions, read-only arrays.
        return np.asarray(array)


def _from_buffer(array: Any) -> Array:
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        return np.asarray(array)


def _check_on_cpu(device: int, array: Any, argument: str) -> None:
    if device in DLPACK_GPU:
        raise TypeError(
            f"{argument} is a {type(array).__name__} on a GPU: must lie on the CPU here"
        )
    if device not in _DLPACK_CPU:
        raise TypeError(
            f"{argument} is a {type(array).__name__} on another device than the CPU or an"
            f" NVIDIA GPU (DLPack device type {device}): it can't be taken here"
        )


def _lends_memory(array: Any) -> bool:
    """Whether NumPy's view of it is the array itself, not a copy as of a list or a number."""
    if is_torch(array) and (array.is_conj() or array.is_neg()):
        return False
    if on_gpu(array):
        return True
    if isinstance(array, np.ndarray) or hasattr(array, "__dlpack__"):
        return not isinstance(array, np.generic)
    try:
        memoryview(array)
    except TypeError:
        return False
    return True


def like(original: Any) -> Callable[[Array], Any]:
    """A function that gives a NumPy result the kind of `original`."""
    if isinstance(original, np.ndarray | np.generic):
        return lambda result: result
    if on_gpu(original):
        return lambda result: cuda().export(result, original)
    if is_torch(original):
        return to_torch
    if hasattr(original, "__array_namespace__"):
        convert: Callable[[Array], Any] = original.__array_namespace__().asarray
        return convert
    return lambda result: result


def is_plain(array: Array) -> bool:
    """Whether its elements lie one after the other, in C order."""
    if is_device(array):
        return bool(array.flags.c_contiguous)
    return array.flags.c_contiguous and array.flags.aligned


def packed(array: Array) -> Array:
    """The array itself where its elements lie one after the other, else such a copy."""
    if is_plain(array):
        return array
    if is_device(array) and array.dtype.kind == "V":
        # CuPy copies no 8-bit floats.
        return array.view(f"u{array.itemsize}").copy().view(array.dtype)
    return array.copy()


def flat(array: Array) -> Array:
    """The elements in C order, in one dimension: a view where possible, else a copy."""
    return packed(array).reshape(-1)


def empty(shape: int | tuple[int, ...], dtype: np.dtype[Any], beside: Array) -> Array:
    """New memory of the kind that `beside` lies in."""
    made: Array = cuda().empty(shape, dtype) if is_device(beside) else np.empty(shape, dtype)
    return made


def address(array: Array) -> int:
    """Where its first element lies."""
    return cuda().address(array) if is_device(array) else array.ctypes.data


def may_overlap(first: Array, second: Array) -> bool:
    """Whether the arrays may have memory in common."""
    return is_device(first) == is_device(second) and np.may_share_memory(first, second)


def is_writeable(array: Array, original: Any) -> bool:
    """Whether it may be written; `original` is the caller's array that it was made of."""
    return not cuda().read_only(original) if is_device(array) else array.flags.writeable


class Output(NamedTuple):
    """Where a result goes: `buffer` is flat and contiguous; `deliver` hands over what it holds.

    `view` is the caller's own array where the buffer is its memory.
    """

    buffer: Array
    deliver: Callable[[], Any]
    view: Array | None = None


def new_output(shape: tuple[int, ...], dtype: np.dtype[Any], original: Any) -> Output:
    """Fresh memory, handed over as an array of the kind of `original`."""
    result: Array = cuda().empty(shape, dtype) if on_gpu(original) else np.empty(shape, dtype)
    convert = like(original)
    return Output(result.reshape(-1), lambda: convert(result))


def given_output(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "out"
) -> Output:
    """The caller's own array. ValueError or TypeError where the result can't be written into it."""
    view = to_array(out, name)
    if view is not out and not _lends_memory(out):
        raise TypeError(f"{name} is a {type(out).__name__}: must be an array that can be written")
    if view.shape != shape:
        raise ValueError(f"{name} has shape {view.shape}: must have the result's, {shape}")
    if view.dtype != dtype:
        raise TypeError(f"{name} has dtype {view.dtype}: must have the result's, {dtype}")
    if not is_writeable(view, out):
        raise ValueError(f"{name} is read-only: must be an array that can be written")
    refuse_false_gradient(out, name)
    buffer = view if is_plain(view) else empty(shape, dtype, view)

    def deliver() -> Any:
        if buffer is not view:
            view[...] = buffer
        if is_device(view):
            cuda().hand_back(out)
        return out

    return Output(buffer.reshape(-1), deliver, view if buffer is view else None)


def check_same_memory(array: Array, output: Output, name: str = "out") -> None:
    """TypeError where an array lies on a GPU and its output doesn't, or the other way round."""
    if is_device(array) != is_device(output.buffer):
        places = ["the CPU", "a GPU"]
        raise TypeError(
            f"{name} lies on {places[is_device(output.buffer)]}: must lie on"
            f" {places[is_device(array)]}, as the array does"
        )
