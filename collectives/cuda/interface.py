"""The part of CUDA that is used: memory, streams, events and a few kernels.

All other modules use this interface only, so that they run, and are tested, on machines without a
GPU. `cupy_cuda` is the implementation.

A device array has the attributes and methods that NumPy's and CuPy's arrays share: `shape`, `size`,
`dtype`, `nbytes`, `flags.c_contiguous`, `reshape`, `view`, `astype`, `copy`, slices. Operations on
it are put on the current stream, as in CuPy.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from collectives.reductions.reduction import ReduceOp

DeviceArray: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]

DLPACK_GPU = (2, 13)
"""kDLCUDA and kDLCUDAManaged, as returned by `__dlpack_device__`."""


class Event(Protocol):
    """A point in a stream's sequence of work."""

    def done(self) -> bool:
        """Whether all work before it has completed. Does not wait."""


class Stream(Protocol):
    """A queue of work on a GPU."""

    handle: int

    def record(self, event: Any = None) -> Event:
        """The point after all work enqueued so far.

        A given event is re-recorded at that point; streams that already wait for it are not
        affected.
        """

    def wait(self, event: Event) -> None:
        """Make work enqueued from now on wait for the event. The host does not wait."""

    def capturing(self) -> bool:
        """Whether work is captured into a graph instead of being executed."""

    def same_as(self, other: Any) -> bool:
        """Whether it is the same stream for certain."""

    def synchronize(self) -> None:
        """Block the host until all work has completed."""


class Cuda(ABC):
    """The GPUs of one process. The current GPU and stream belong to the calling thread."""

    array_type: Any
    """The type of device arrays; `array` returns such an array unchanged."""

    @abstractmethod
    def problem(self) -> str | None:
        """Why no GPU can be used here, and the remedy; None where one can."""

    @abstractmethod
    def device_count(self) -> int:
        """Number of GPUs visible to this process."""

    @abstractmethod
    def current_device(self) -> int:
        """The number of the current GPU."""

    @abstractmethod
    def use_device(self, number: int) -> None:
        """Make this GPU the current one."""

    @abstractmethod
    def device_of(self, array: DeviceArray) -> int:
        """The number of the GPU that holds an array."""

    @abstractmethod
    def uuid(self, number: int) -> str:
        """A text that identifies this GPU uniquely."""

    @abstractmethod
    def capability(self, number: int) -> tuple[int, int]:
        """The GPU's compute capability, such as (9, 0)."""

    @abstractmethod
    def array(self, given: Any) -> DeviceArray:
        """An array of any kind on a GPU as a device array that shares its memory.

        Work enqueued on the current stream from now on is ordered after the work that filled it.
        """

    @abstractmethod
    def of_tensor(self, tensor: Any) -> DeviceArray | None:
        """As `array`, for a torch tensor whose memory holds its elements in C order.

        None for other tensors, those that require a gradient, and those on another GPU.
        """

    @abstractmethod
    def export(self, array: DeviceArray, original: Any) -> Any:
        """The device array as an array of the kind of `original`, sharing memory.

        The caller's library orders its work after what is on the current stream.
        """

    @abstractmethod
    def read_only(self, original: Any) -> bool:
        """Whether an array of any kind is marked as read-only."""

    @abstractmethod
    def hand_back(self, original: Any) -> None:
        """Like `export`, for the caller's own array after it was read or written."""

    @abstractmethod
    def empty(self, shape: int | Shape, dtype: np.dtype[Any]) -> DeviceArray:
        """New memory on the current GPU."""

    @abstractmethod
    def at(self, address: int, length: int, dtype: np.dtype[Any]) -> DeviceArray:
        """Memory of the current GPU as a flat array that does not own it."""

    @abstractmethod
    def address(self, array: DeviceArray) -> int:
        """Address of an array's first element."""

    def is_plain_on(self, array: DeviceArray, number: int) -> bool:
        """Whether a device array is contiguous, and on the GPU of that number."""
        return self.device_of(array) == number and self.is_contiguous(array)

    @abstractmethod
    def is_contiguous(self, array: DeviceArray) -> bool:
        """Whether an array's elements are contiguous in C order."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that receives the calling thread's work."""

    @abstractmethod
    def current_streams(self) -> Sequence[Stream]:
        """The current stream, and torch's where the program uses torch on GPUs."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream of the highest priority, not synchronized with the null stream."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context in which the stream is the current one."""

    @abstractmethod
    def beside(self, stream: Stream) -> AbstractContextManager[Any]:
        """Context in which the stream is the current one, torch's as well."""

    @abstractmethod
    def as_torch(self) -> AbstractContextManager[Any]:
        """Context in which torch's current stream is the current one."""

    @abstractmethod
    def fold(self, op: ReduceOp, first: DeviceArray, second: DeviceArray, out: DeviceArray) -> None:
        """Fold two arrays into `out`, which may be one of them, like `Reduction.fold`."""

    @abstractmethod
    def divide(self, array: DeviceArray, number: int) -> None:
        """Divide in place; 16-bit floats are divided in float32."""

    @abstractmethod
    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Launch a kernel of `kernels.SOURCE` on the current stream, `kernels.THREADS` per block.

        Arguments are device arrays and NumPy scalars.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Pinned host memory, which a GPU copies from and to directly."""

    @abstractmethod
    def copy_to_host(self, source: DeviceArray, target: NDArray[Any]) -> None:
        """Enqueue a copy on the current stream; both flat, of equal dtype, `target` pinned."""

    @abstractmethod
    def copy_to_device(self, source: NDArray[Any], target: DeviceArray) -> None:
        """Enqueue a copy on the current stream; both flat, of equal dtype, `source` pinned."""

    @abstractmethod
    def allocate_arena(self, nbytes: int) -> DeviceArray:
        """Bytes that other processes may open, allocated outside any pool."""

    @abstractmethod
    def export_arena(self, arena: DeviceArray) -> bytes:
        """The handle by which another process opens the arena."""

    @abstractmethod
    def open_arena(self, handle: bytes, nbytes: int) -> DeviceArray:
        """Open another process's arena on the same GPU."""

    @abstractmethod
    def close_arena(self, arena: DeviceArray) -> None:
        """Close an arena that was opened."""

    @abstractmethod
    def free_arena(self, arena: DeviceArray) -> None:
        """Free an own arena after all other processes have closed it."""


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)
