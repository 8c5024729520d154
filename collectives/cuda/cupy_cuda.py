"""Implementation of the CUDA interface with CuPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import cupy
import cupyx
import numpy as np
from numpy.typing import NDArray

from collectives.cuda import kernels
from collectives.cuda.cupy_streams import (
    CupyStream,
    current_stream,
    follow,
    is_torchs,
    torch_on_gpus,
    torch_stream,
    using,
)
from collectives.cuda.cupy_tensors import TensorArrays, is_registered, to_tensor
from collectives.cuda.interface import Cuda, DeviceArray, Shape, Stream, is_torch
from collectives.reductions.reduction import BFLOAT16, ReduceOp, reduction_for

_runtime = cupy.cuda.runtime
# Beyond the range of any GPU: CUDA clamps it to the highest priority.
_HIGHEST_PRIORITY = -100
_DRIVER = Path("/proc/driver/nvidia/version")
_HALVES = (np.dtype(np.float16), BFLOAT16)


class CupyCuda(Cuda):
    """`Cuda` documents each method."""

    array_type = cupy.ndarray

    def __init__(self) -> None:
        self._kernels: dict[str, Any] = {}
        # Never destroyed: torch records events on streams that have used a tensor when it is freed.
        self._noted_by_torch: dict[int, tuple[Any, Any]] = {}
        self._tensors = TensorArrays()

    def problem(self) -> str | None:
        """CuPy can be imported without a driver, so the devices are counted."""
        try:
            if _runtime.getDeviceCount():
                return None
        except _runtime.CUDARuntimeError as error:
            # CUDA reports an insufficient driver also where there is none.
            cause = error if _DRIVER.exists() else f"no NVIDIA driver is loaded ({error})"
            return f"CuPy {cupy.__version__} finds no GPU: {cause}"
        return f"CuPy {cupy.__version__} finds no GPU"

    def device_count(self) -> int:
        """Number of devices, limited by CUDA_VISIBLE_DEVICES."""
        return int(_runtime.getDeviceCount())

    def current_device(self) -> int:
        """Of the calling thread."""
        return int(_runtime.getDevice())

    def use_device(self, number: int) -> None:
        """For the calling thread."""
        cupy.cuda.Device(number).use()

    def device_of(self, array: DeviceArray) -> int:
        """As recorded by CuPy."""
        return int(array.data.device_id)

    def uuid(self, number: int) -> str:
        """UUID, which CuPy truncates at a zero byte, and therefore also the PCI bus address."""
        uuid = bytes(_runtime.getDeviceProperties(number)["uuid"])[:16].hex()
        return f"{uuid} at {cupy.cuda.Device(number).pci_bus_id}"

    def capability(self, number: int) -> tuple[int, int]:
        """Parsed from CuPy's "90" for (9, 0)."""
        text = cupy.cuda.Device(number).compute_capability
        return int(text[:-1]), int(text[-1])

    def array(self, given: Any) -> DeviceArray:
        """CuPy's own array as it is; a torch tensor is ordered after torch's stream."""
        if isinstance(given, cupy.ndarray):
            return given
        if is_torch(given):
            return self._from_torch(given.detach().resolve_conj().resolve_neg())
        if hasattr(given, "__cuda_array_interface__"):
            # CuPy waits for the stream that the interface names.
            return cupy.asarray(given)
        return cupy.from_dlpack(given)

    def _from_torch(self, tensor: Any) -> DeviceArray:
        self._follow_torch(tensor)
        return self._tensors.array(tensor)

    def _follow_torch(self, tensor: Any) -> None:
        number, current = tensor.get_device(), current_stream()
        if number != self.current_device() or is_torchs(current, number):
            return
        stream = torch_stream(number)
        if stream.capturing():
            raise RuntimeError(
                "torch captures a graph on a stream that is not CuPy's current one: capture"
                " within `with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):`"
            )
        follow(current, stream)

    def of_tensor(self, tensor: Any) -> DeviceArray | None:
        """The array holds the tensor."""
        if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.get_device() != self.current_device():
            return None
        self._follow_torch(tensor)
        return self._tensors.plain(tensor)

    def export(self, array: DeviceArray, original: Any) -> Any:
        """By DLPack, except for CuPy's own arrays."""
        if isinstance(original, cupy.ndarray):
            return array
        if is_torch(original):
            self.hand_back(original)
            return to_tensor(array)
        if hasattr(original, "__array_namespace__"):
            return original.__array_namespace__().from_dlpack(array)
        return array

    def read_only(self, original: Any) -> bool:
        """As recorded in the interface; JAX arrays are read-only."""
        if isinstance(original, cupy.ndarray) or is_torch(original):
            return False
        interface = getattr(original, "__cuda_array_interface__", None)
        return interface is None or bool(interface["data"][1])

    def hand_back(self, original: Any) -> None:
        """Only torch's arrays can be written besides CuPy's."""
        if is_torch(original) and not is_torchs(current_stream(), original.get_device()):
            follow(torch_stream(original.get_device()), current_stream())

    def empty(self, shape: int | Shape, dtype: np.dtype[Any]) -> DeviceArray:
        """From CuPy's pool, which does not support 8-bit floats."""
        if is_registered(dtype) and dtype != BFLOAT16:
            return cupy.empty(shape, f"u{dtype.itemsize}").view(dtype)
        return cupy.empty(shape, dtype)

    def at(self, address: int, length: int, dtype: np.dtype[Any]) -> DeviceArray:
        """As unowned memory."""
        if not length:
            return cupy.empty(0, dtype)
        nbytes, device = length * dtype.itemsize, self.current_device()
        memory = cupy.cuda.UnownedMemory(address, nbytes, None, device)
        return cupy.ndarray((length,), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def address(self, array: DeviceArray) -> int:
        """Without the overhead of `__cuda_array_interface__`."""
        return int(array.data.ptr)

    def is_plain_on(self, array: DeviceArray, number: int) -> bool:
        """In one function, for the calls that recur."""
        return bool(array._c_contiguous) and bool(array.data.device_id == number)

    def is_contiguous(self, array: DeviceArray) -> bool:
        """As `flags.c_contiguous`, without an object for the flags."""
        return bool(array._c_contiguous)

    def current_stream(self) -> Stream:
        """CuPy's current stream."""
        return current_stream()

    def current_streams(self) -> Sequence[Stream]:
        """CuPy's, and torch's."""
        current, number = current_stream(), self.current_device()
        if torch_on_gpus() is None or is_torchs(current, number):
            return [current]
        return [current, torch_stream(number)]

    def new_stream(self) -> Stream:
        """Non-blocking."""
        return CupyStream(cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY))

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """By `use`."""
        return using(stream.stream)

    @contextmanager
    def beside(self, stream: Any) -> Iterator[None]:
        """By `use`, and torch's stream context."""
        torch, number = torch_on_gpus(), self.current_device()
        if torch is None:
            with using(stream.stream):
                yield
            return
        if stream.handle not in self._noted_by_torch:
            external = torch.cuda.ExternalStream(stream.handle, device=number)
            self._noted_by_torch[stream.handle] = stream, external
        # torch's own context takes four times as long.
        before = torch.cuda.current_stream(number)
        try:
            torch.cuda.set_stream(self._noted_by_torch[stream.handle][1])
            with using(stream.stream):
                yield
        finally:
            torch.cuda.set_stream(before)

    def as_torch(self) -> AbstractContextManager[Any]:
        """By `use`."""
        number = self.current_device()
        if is_torchs(current_stream(), number):
            return nullcontext()
        return using(torch_stream(number).stream)

    def fold(self, op: ReduceOp, first: DeviceArray, second: DeviceArray, out: DeviceArray) -> None:
        """CuPy's ufuncs have NumPy's semantics, including NaN, bool and 16-bit floats."""
        getattr(cupy, reduction_for(op, out.dtype, True).ufunc.__name__)(first, second, out=out)

    def divide(self, array: DeviceArray, number: int) -> None:
        """A complex number is divided as its two parts."""
        if array.dtype.kind == "c":
            array = array.view(array.real.dtype)
        if array.dtype in _HALVES:
            array[...] = (array.astype(np.float32) / np.float32(number)).astype(array.dtype)
        else:
            cupy.divide(array, array.dtype.type(number), out=array)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any]) -> None:
        """The kernel is compiled at its first launch."""
        compiled = self._kernels.get(kernel)
        if compiled is None:
            module = cupy.RawModule(
                code=kernels.SOURCE, options=("-std=c++17",), name_expressions=[kernel]
            )
            compiled = self._kernels[kernel] = module.get_function(kernel)
        compiled((blocks,), (kernels.THREADS,), tuple(arguments))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """From CuPy's pool of pinned memory."""
        memory: NDArray[np.uint8] = cupyx.empty_pinned((nbytes,), np.uint8)
        return memory

    def copy_to_host(self, source: DeviceArray, target: NDArray[Any]) -> None:
        """By cudaMemcpyAsync."""
        address, kind = target.ctypes.data, _runtime.memcpyDeviceToHost
        _runtime.memcpyAsync(address, source.data.ptr, source.nbytes, kind, current_stream().handle)

    def copy_to_device(self, source: NDArray[Any], target: DeviceArray) -> None:
        """By cudaMemcpyAsync."""
        address, kind = source.ctypes.data, _runtime.memcpyHostToDevice
        _runtime.memcpyAsync(target.data.ptr, address, target.nbytes, kind, current_stream().handle)

    def allocate_arena(self, nbytes: int) -> DeviceArray:
        """By cudaMalloc, because a pool's block shares its IPC handle with other blocks."""
        return self.at(_runtime.malloc(nbytes), nbytes, np.dtype(np.uint8))

    def export_arena(self, arena: DeviceArray) -> bytes:
        """By cudaIpcGetMemHandle."""
        return bytes(_runtime.ipcGetMemHandle(arena.data.ptr))

    def open_arena(self, handle: bytes, nbytes: int) -> DeviceArray:
        """By cudaIpcOpenMemHandle."""
        return self.at(_runtime.ipcOpenMemHandle(handle), nbytes, np.dtype(np.uint8))

    def close_arena(self, arena: DeviceArray) -> None:
        """By cudaIpcCloseMemHandle."""
        _runtime.ipcCloseMemHandle(arena.data.ptr)

    def free_arena(self, arena: DeviceArray) -> None:
        """By cudaFree, which waits for pending work."""
        _runtime.free(arena.data.ptr)
