"""Conversion of arrays of every kind to NumPy, and back.

Accepted: NumPy arrays and scalars; torch tensors, JAX arrays and others on the CPU that implement
DLPack; objects with the buffer protocol; numbers and lists. The result for a torch tensor is a
tensor, for an array with an array-API namespace an array of that namespace, otherwise NumPy.

An array on a GPU (of CuPy, torch, or any library with `__cuda_array_interface__` or DLPack) stays
there. It is converted to a device array, which supports the NumPy operations used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.tensors import from_torch, is_lazy, refuse_false_gradient, to_torch
from collectives.cuda.interface import DLPACK_GPU, is_torch
from collectives.cuda.runtime import cuda, on_gpu
from collectives.reductions.reduction import Array

# kDLCPU, and kDLCUDAHost for pinned host memory.
_DLPACK_CPU = (1, 3)


def to_array(array: Any, argument: str = "array") -> Array:
    """`array` as a NumPy or device array, sharing its memory where possible.

    Raises TypeError like `to_numpy`, and BackendUnavailableError for a GPU array without CuPy.
    """
    if not on_gpu(array):
        return to_numpy(array, argument)
    converted: Array = cuda().array(array)
    _check_dtype(converted.dtype, argument)
    _check_current(converted, argument)
    return converted


def _check_current(array: Array, argument: str) -> None:
    """Raise TypeError for an array on another GPU than the current one."""
    gpus = cuda()
    number, current = gpus.device_of(array), gpus.current_device()
    if number != current:
        commands = f"`cupy.cuda.Device({number}).use()` or `torch.cuda.set_device({number})`"
        raise TypeError(
            f"{argument} lies on GPU {number}, and the current one is {current}: make its own"
            f" current first ({commands})"
        )


def is_device(array: Any) -> bool:
    """Whether the result of `to_array` is a device array."""
    return type(array) is not np.ndarray


def to_numpy(array: Any, argument: str = "array") -> Array:
    """`array` as a NumPy array, sharing its memory where possible.

    Raises TypeError if it holds Python objects or lies on a device other than the CPU.
    """
    if type(array) is np.ndarray:
        converted = array
    elif isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{argument} is a masked array, whose mask would be lost: send both parts")
    elif isinstance(array, np.ndarray):
        converted = array.view(np.ndarray)
    elif is_torch(array):
        converted = from_torch(array, argument)
    elif hasattr(array, "wait") and hasattr(array, "done"):
        raise TypeError(
            f"{argument} is a {type(array).__name__}, the handle of a call: pass the result of its"
            " `wait()`"
        )
    elif array is None:
        raise TypeError(
            f"{argument} is None: must be an array on every rank, also on one that only receives"
            " (broadcast_object needs none). Where it is the gradient of a parameter that was not"
            " used, pass zeros, or omit it on every rank"
            " (`torch.zeros_like(p) if p.grad is None else p.grad`)"
        )
    elif hasattr(array, "__dlpack_device__"):
        _check_on_cpu(array.__dlpack_device__()[0], array, argument)
        converted = _from_dlpack(array)
    else:
        try:
            converted = _from_buffer(array, argument)
        except ValueError as error:
            if not isinstance(array, list | tuple):
                raise
            raise ValueError(f"{argument} is no array: {error}") from error
    _check_dtype(converted.dtype, argument)
    return converted


_AS_NUMBERS = {
    **dict.fromkeys("Mm", ", such as its view('i8')"),
    **dict.fromkeys("SU", ", such as its view('u1')"),
}


def _check_dtype(dtype: np.dtype[Any], argument: str) -> None:
    if dtype.hasobject or dtype.kind not in "biufcV" or not dtype.itemsize:
        raise TypeError(
            f"{argument} of dtype {dtype}: only fixed-size numbers can be sent as arrays"
            f"{_AS_NUMBERS.get(dtype.kind, '')};"
            " broadcast_object, all_gather_object and a mailbox (`comm.mailbox()`) take anything"
            " that pickles"
        )


def _from_dlpack(array: Any) -> Array:
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError):
        # NumPy's importer supports neither bfloat16 nor, in older versions, read-only arrays.
        return np.asarray(array)


def _from_buffer(array: Any, argument: str) -> Array:
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        pass
    try:
        return np.asarray(array)
    except TypeError as error:
        # By its name, since to look for the class would import JAX.
        if type(error).__name__ != "TracerArrayConversionError":
            raise
        raise TypeError(
            f"{argument} is traced by JAX, within jit or grad: there `collectives.jax` has the"
            " collectives, as `collectives.jax.all_reduce`"
        ) from error


def _check_on_cpu(device: int, array: Any, argument: str) -> None:
    if device in DLPACK_GPU:
        raise TypeError(
            f"{argument} is a {type(array).__name__} on a GPU: must lie on the CPU here"
        )
    if device not in _DLPACK_CPU:
        raise TypeError(
            f"{argument} is a {type(array).__name__} on another device than the CPU or an"
            f" NVIDIA GPU (DLPack device type {device}): such devices are not supported"
        )


def _lends_memory(array: Any) -> bool:
    """Whether its NumPy array shares its memory, unlike the copy of a list or a number."""
    if is_torch(array) and is_lazy(array):
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
    """A function that converts a NumPy result to the kind of `original`."""
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
    """Whether its elements are contiguous in C order and aligned."""
    if is_device(array):
        return cuda().is_contiguous(array)
    return array.flags.c_contiguous and array.flags.aligned


def packed(array: Array) -> Array:
    """The array itself if it is contiguous, otherwise a contiguous copy."""
    return array if is_plain(array) else copied(array)


def copied(array: Array) -> Array:
    """A contiguous copy."""
    if is_device(array) and array.itemsize == 1:
        # CuPy can't copy 8-bit floats.
        return array.view(np.uint8).copy().view(array.dtype)
    return array.copy()


def assign(target: Array, source: Array) -> None:
    """Copy the elements of an array of the same shape and dtype."""
    if is_device(target) and target.itemsize == 1:
        # CuPy can't copy 8-bit floats.
        target, source = target.view(np.uint8), source.view(np.uint8)
    target[...] = source


def flat(array: Array) -> Array:
    """The elements in C order as one dimension: a view where possible, else a copy."""
    return packed(array).reshape(-1)


def empty(shape: int | tuple[int, ...], dtype: np.dtype[Any], beside: Array) -> Array:
    """New memory on the device of `beside`."""
    made: Array = cuda().empty(shape, dtype) if is_device(beside) else np.empty(shape, dtype)
    return made


def address(array: Array) -> int:
    """Address of its first element."""
    return cuda().address(array) if is_device(array) else array.ctypes.data


def after_reading(array: Any) -> Any:
    """The caller's array; what its library enqueues from now on comes after what has read it."""
    if on_gpu(array):
        cuda().hand_back(array)
    return array


def may_overlap(first: Array, second: Array) -> bool:
    """Whether the arrays may share memory."""
    return is_device(first) == is_device(second) and np.may_share_memory(first, second)


def is_writeable(array: Array, original: Any) -> bool:
    """Whether it may be written; `original` is the caller's array that it was converted from."""
    return not cuda().read_only(original) if is_device(array) else array.flags.writeable


class Output(NamedTuple):
    """Destination of a result. `buffer` is flat and contiguous; `deliver` returns the result.

    `view` is the caller's own array if the buffer is its memory.
    """

    buffer: Array
    deliver: Callable[[], Any]
    view: Array | None = None


def new_output(shape: tuple[int, ...], dtype: np.dtype[Any], original: Any) -> Output:
    """New memory, delivered as an array of the kind of `original`."""
    result: Array = cuda().empty(shape, dtype) if on_gpu(original) else np.empty(shape, dtype)
    convert = like(original)
    return Output(result.reshape(-1), lambda: convert(result))


def given_output(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "out"
) -> Output:
    """The caller's own array; ValueError or TypeError if the result can't be written into it."""
    view = to_array(out, name)
    if view is not out and not _lends_memory(out):
        lazy = (
            " that is conjugated or negated when it is read"
            if is_torch(out) and is_lazy(out)
            else ""
        )
        kind = f"{type(out).__name__}{lazy}"
        raise TypeError(f"{name} is a {kind}: must be an array that can be written")
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
            assign(view, buffer)
        if is_device(view):
            cuda().hand_back(out)
        return out

    return Output(buffer.reshape(-1), deliver, view if buffer is view else None)


def check_same_memory(array: Array, output: Output, name: str = "out") -> None:
    """Raise TypeError if one of array and output lies on a GPU and the other does not."""
    if is_device(array) != is_device(output.buffer):
        places = ["the CPU", "a GPU"]
        raise TypeError(
            f"{name} lies on {places[is_device(output.buffer)]}: must lie on"
            f" {places[is_device(array)]}, as the array does"
        )
