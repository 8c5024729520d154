"""What is needed of CUDA: memory, streams, events and a few kernels.

Everything above works with this interface alone, so that its logic runs, and is tested, on machines
without a GPU. `cupy_cuda` is the implementation.

A device array has the attributes and methods that NumPy's and CuPy's arrays share: `shape`, `size`,
`dtype`, `nbytes`, `flags.c_contiguous`, `reshape`, `view`, `astype`, `copy`, slices. What is done
with it by these is put on the current stream, as everything that CuPy does.
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
"""kDLCUDA and kDLCUDAManaged, of `__dlpack_device__`."""


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Whether all work before it has ended. Doesn't wait."""


class Stream(Protocol):
    """A queue of work for a GPU."""

    handle: int

    def record(self, event: Any = None) -> Event:
        """The point behind all work that was put on it so far.

        An event that is given means that point from now on; who waits for it already is not
        concerned.
        """

    def wait(self, event: Event) -> None:
        """Let what is put on it from now on wait for the event. The host doesn't wait."""

    def capturing(self) -> bool:
        """Whether work is recorded into a graph instead of being done."""

    def synchronize(self) -> None:
        """Let the host wait for all its work."""


class Cuda(ABC):
    """One process' GPUs. The current GPU and the current stream are the calling thread's own."""

    array_type: Any
    """What `array` returns, and what is taken as it is."""

    @abstractmethod
    def problem(self) -> str | None:
        """Why no GPU can be used here, and what to do; None where one can."""

    @abstractmethod
    def device_count(self) -> int:
        """How many GPUs this process sees."""

    @abstractmethod
    def current_device(self) -> int:
        """The number of the current GPU."""

    @abstractmethod
    def use_device(self, number: int) -> None:
        """Make this GPU the current one."""

    @abstractmethod
    def device_of(self, array: DeviceArray) -> int:
        """The number of the GPU that an array lies on."""

    @abstractmethod
    def uuid(self, number: int) -> str:
        """What tells this GPU from all others."""

    @abstractmethod
    def capability(self, number: int) -> tuple[int, int]:
        """The GPU's compute capability, such as (9, 0)."""

    @abstractmethod
    def array(self, given: Any) -> DeviceArray:
        """An array of any kind on a GPU as a device array that shares its memory.

        What is put on the current stream from now on comes after what filled it.
        """

    @abstractmethod
    def export(self, array: DeviceArray, original: Any) -> Any:
        """The device array as one of the kind of `original`, sharing memory.

        What the caller's library does with it comes after what was put on the current stream.
        """

    @abstractmethod
    def read_only(self, original: Any) -> bool:
        """Whether an array of any kind says that it may not be written."""

    @abstractmethod
    def hand_back(self, original: Any) -> None:
        """As `export`, for an array of the caller's own that was written into."""

    @abstractmethod
    def empty(self, shape: int | Shape, dtype: np.dtype[Any]) -> DeviceArray:
        """New memory on the current GPU."""

    @abstractmethod
    def at(self, address: int, length: int, dtype: np.dtype[Any]) -> DeviceArray:
        """Memory of the current GPU as a flat array, without a claim on its life."""

    @abstractmethod
    def address(self, array: DeviceArray) -> int:
        """Where an array's first element lies."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that the calling thread's work is put on."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream of the highest priority, which doesn't wait for the null stream."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within it the stream is the current one."""

    @abstractmethod
    def fold(self, op: ReduceOp, first: DeviceArray, second: DeviceArray, out: DeviceArray) -> None:
        """Fold two arrays into `out`, which may be one of them, as `reduction.bind_fold` does."""

    @abstractmethod
    def divide(self, array: DeviceArray, number: int) -> None:
        """Divide in place; 16-bit floats in float32."""

    @abstractmethod
    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Put a kernel of `kernels.SOURCE` on the current stream, with `kernels.THREADS` threads.

        Arguments are device arrays and NumPy scalars.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of the host that copies from and to a GPU need not go round."""

    @abstractmethod
    def copy_to_host(self, source: DeviceArray, target: NDArray[Any]) -> None:
        """Put a copy on the current stream; both are flat, of equal dtype, `target` is pinned."""

    @abstractmethod
    def copy_to_device(self, source: NDArray[Any], target: DeviceArray) -> None:
        """Put a copy on the current stream; both are flat, of equal dtype, `source` is pinned."""

    @abstractmethod
    def allocate_arena(self, nbytes: int) -> DeviceArray:
        """Bytes that other processes may open, which no pool hands out."""

    @abstractmethod
    def export_arena(self, arena: DeviceArray) -> bytes:
        """What another process needs to open the arena."""

    @abstractmethod
    def open_arena(self, handle: bytes, nbytes: int) -> DeviceArray:
        """Another process' arena, on the same GPU."""

    @abstractmethod
    def close_arena(self, arena: DeviceArray) -> None:
        """Give back an arena that was opened."""

    @abstractmethod
    def free_arena(self, arena: DeviceArray) -> None:
        """Give back an arena of one's own, which all others have closed."""


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor, which is told without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)
