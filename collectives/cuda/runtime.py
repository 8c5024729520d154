"""Access to the CUDA implementation, detection of arrays on a GPU, copies from and to the host."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cuda.interface import DLPACK_GPU, Cuda, DeviceArray, Event, is_torch
from collectives.errors import BackendUnavailableError

_made: Cuda | None = None


def cuda() -> Cuda:
    """The CUDA implementation with CuPy; BackendUnavailableError if CuPy is not installed."""
    global _made
    if _made is None:
        try:
            from collectives.cuda.cupy_cuda import CupyCuda
        except ImportError as error:
            raise BackendUnavailableError(
                "arrays on a GPU need CuPy: `pip install 'mpi-collectives[cuda12]'` (or [cuda13])"
                f" installs it ({error})"
            ) from error
        _made = CupyCuda()
    return _made


def wait_for(event: Event, timeout: float | None = None) -> None:
    """Block the host until local work has completed that needs no other rank.

    Raises TimeoutError after `timeout` seconds.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while not event.done():
        if end is not None and time.monotonic() >= end:
            raise TimeoutError(f"not done after {timeout} s")
        # Yields the core and Python's lock; the wait is short.
        time.sleep(0)


def on_gpu(array: Any) -> bool:
    """Whether it is an array in GPU memory, of any library."""
    if _made is not None and type(array) is _made.array_type:
        return True
    if isinstance(array, np.generic) or type(array) is np.ndarray:
        return False
    if is_torch(array):
        return bool(array.is_cuda)
    if hasattr(array, "__cuda_array_interface__"):
        return True
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack_device__"):
        return False
    return array.__dlpack_device__()[0] in DLPACK_GPU


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
