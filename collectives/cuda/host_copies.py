"""Synchronous copies between device arrays and the host."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from collectives.cuda.interface import DeviceArray
from collectives.cuda.runtime import cuda


def fetched(array: DeviceArray) -> NDArray[Any]:
    """The elements of a flat device array, after the current stream's pending work on it."""
    gpus = cuda()
    copy: NDArray[Any] = gpus.pinned(array.nbytes).view(array.dtype)
    if array.size:
        gpus.copy_to_host(array, copy)
        gpus.current_stream().synchronize()
    return copy


def filled(array: DeviceArray, elements: NDArray[Any]) -> None:
    """Write the elements into a flat device array."""
    gpus = cuda()
    copy = gpus.pinned(elements.nbytes).view(elements.dtype)
    copy[:] = elements
    if array.size:
        gpus.copy_to_device(copy, array)
        gpus.current_stream().synchronize()
