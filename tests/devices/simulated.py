"""A GPU simulated by threads and host memory, for testing the layers above `Cuda` without one.

Streams are threads, so that work is really asynchronous: what is read too early is garbage, and
what isn't ordered by events runs in any order. A host thread's operation on a device array
(`OnDevice`) by NumPy's operators waits for the thread's current stream and then runs at once.

Memory that the host has freed is overwritten and reused (`simulated_memory`).
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.cuda.interface import Cuda
from collectives.reductions.reduction import ReduceOp, reduction_for
from tests.devices.simulated_arrays import Foreign, OnDevice, address_of, memory_at, plain
from tests.devices.simulated_memory import Pool
from tests.devices.simulated_streams import SimulatedStream

KERNELS: dict[str, Callable[[int, Sequence[Any]], None]] = {}
"""What `launch` runs, by name: (blocks, arguments), where arrays are plain views. Tests fill it."""

ARENA_UNIT = 2 << 20


class _Here(threading.local):
    """The state of the calling thread."""

    rank, device, stream = 0, 0, None

    def __init__(self):
        self.null_streams, self.graphs = {}, []


class _Arena(NamedTuple):
    memory: OnDevice
    owner: int
    uuid: str
    openers: list[int]


class SimulatedCuda(Cuda):
    """One machine's GPUs. Threads are ranks: each declares its rank by `be_rank`."""

    array_type = OnDevice

    def __init__(self, devices=8):
        self.devices = devices
        self.missing: dict[int, str] = {}  # by rank: the result of `problem`
        self.uuids: dict[tuple[int, int], Any] = {}  # by (rank, device), if not the device
        self.capabilities: dict[int, tuple[int, int]] = {}  # by device, if not (9, 0)
        self.allocations = 0
        self.launches: list[tuple[str, int]] = []
        self.open_arenas: dict[int, _Arena] = {}  # by address
        self.streams: dict[int, SimulatedStream] = {}  # by handle
        self.closed = threading.Event()
        self._here, self._lock = _Here(), threading.Lock()
        self._memory, self._pinned = Pool(), Pool()

    # For tests.

    def be_rank(self, rank, device=None):
        """Make the calling thread one of this rank, on this GPU: its own for None."""
        self._here.rank = rank
        self.use_device(rank if device is None else device)

    @property
    def rank(self):
        return self._here.rank

    @property
    def device(self):
        return self._here.device

    def close(self):
        """End all streams. Raises the errors on streams that no thread has waited for."""
        self.closed.set()
        for stream in list(self.streams.values()):
            stream.end()
        errors = [stream.error for stream in self.streams.values() if stream.error is not None]
        self._memory.close()
        self._pinned.close()
        if errors:
            raise errors[0]

    def put(self, stream, function):
        """Any work."""
        stream.put(function)

    def slow(self, stream, seconds):
        """Work that only takes time; `close` doesn't wait for it."""
        stream.put(partial(self.closed.wait, seconds))

    def from_host(self, values):
        """A device array of these values, at once."""
        values = np.asarray(plain(values))
        array = self._empty(values.shape, values.dtype, settled=True)
        plain(array)[...] = values
        return array

    def foreign(self, values, stream=None, read_only=False):
        """Another library's array of these values, on a stream of that library."""
        return Foreign(self.from_host(values), stream or self.new_stream(), read_only)

    def owns(self, address, nbytes):
        """Whether all of it is memory of one allocation on a GPU."""
        return self._memory.owns(address, nbytes)

    def open_graph(self, graph):
        """Note what the calling thread captures."""
        self._here.graphs.append(graph)

    def refuse_capture(self, what):
        """Where the thread captures anything: raise, and make the capture fail, as CUDA does."""
        graphs = self._here.graphs = [graph for graph in self._here.graphs if graph.open]
        for graph in graphs:
            graph.invalid = True
        if graphs or self.captures():
            raise RuntimeError(f"{what} during capture")

    # `Cuda`'s interface.

    def problem(self):
        return self.missing.get(self.rank)

    def device_count(self):
        return self.devices

    def current_device(self):
        return self.device

    def use_device(self, number):
        assert 0 <= number < self.devices, "no such GPU"
        self._here.device = number

    def device_of(self, array):
        return array.memory.gpu if isinstance(array, Foreign) else array.gpu

    def uuid(self, number):
        return f"GPU-{self.uuids.get((self.rank, number), number)}"

    def capability(self, number):
        return self.capabilities.get(number, (9, 0))

    def array(self, given):
        if isinstance(given, OnDevice):
            return given
        if not isinstance(given, Foreign):
            raise TypeError(f"{type(given).__name__}: not on a GPU")
        if given.stream is not self.current_stream():
            self.current_stream().wait(given.stream.record())
        view = given.memory.view()
        view.flags.writeable = not given.read_only
        return view

    def export(self, array, original):
        assert isinstance(array, OnDevice)
        if not isinstance(original, Foreign):
            return array
        self.hand_back(original)
        return Foreign(array, original.stream)

    def read_only(self, original):
        return original.__cuda_array_interface__["data"][1]

    def hand_back(self, original):
        assert isinstance(original, Foreign | OnDevice)
        if isinstance(original, Foreign) and original.stream is not self.current_stream():
            original.stream.wait(self.current_stream().record())

    def _allocate(self, nbytes, *, settled=False):
        """Bytes of garbage at an address with the GPU's alignment."""
        self.refuse_capture("memory was allocated")
        held, memory = self._memory.allocate(nbytes, self.current_stream(), settled=settled)
        array = held.view(OnDevice)
        array.cuda, array.gpu, array.memory = self, self.device, memory
        with self._lock:
            self.allocations += 1
        return array[:nbytes]

    def empty(self, shape, dtype):
        return self._empty(shape, dtype)

    def _empty(self, shape, dtype, *, settled=False):
        shape = (shape,) if np.ndim(shape) == 0 else tuple(shape)
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        memory = self._allocate(count * dtype.itemsize, settled=settled)
        return memory.view(dtype).reshape(shape)

    def at(self, address, length, dtype):
        dtype = np.dtype(dtype)
        assert not length or self.owns(address, length * dtype.itemsize), "not memory of a GPU"
        array = memory_at(address, length, dtype).view(OnDevice)
        array.cuda, array.gpu = self, self.device
        return array

    def is_contiguous(self, array):
        return array.flags.c_contiguous

    def address(self, array):
        return address_of(array)

    def current_stream(self):
        here = self._here
        if here.stream is not None and here.stream.device == here.device:
            return here.stream
        if here.device not in here.null_streams:
            here.null_streams[here.device] = self.new_stream()
        return here.null_streams[here.device]

    def current_streams(self):
        return [self.current_stream()]

    def captures(self):
        """Whether the current stream does. Creates none for a thread without one (a watchdog)."""
        here = self._here
        return any(
            stream is not None and stream.capturing()
            for stream in (here.stream, here.null_streams.get(here.device))
        )

    def new_stream(self):
        return SimulatedStream(self, self.device)

    @contextlib.contextmanager
    def on(self, stream):
        previous, self._here.stream = self._here.stream, stream
        try:
            yield stream
        finally:
            self._here.stream = previous

    @contextlib.contextmanager
    def beside(self, stream):
        assert stream.device == self.device, "the stream is another GPU's"
        with self.on(stream):
            yield

    def as_torch(self):
        return contextlib.nullcontext()

    def of_tensor(self, tensor):
        if tensor.read_only or not tensor.memory.flags.c_contiguous:
            return None
        return self.array(tensor)

    def _operand(self, array):
        assert isinstance(array, OnDevice), f"{type(array).__name__}: not a device array"
        assert array.gpu == self.device, "the array lies on another GPU than the current one"
        return plain(array)

    def fold(self, op, first, second, out):
        pieces = [self._operand(piece) for piece in (first, second, out)]
        assert len({(piece.dtype, piece.shape) for piece in pieces}) == 1
        assert all(piece.flags.c_contiguous for piece in pieces)
        self.current_stream().put(partial(reduction_for(op, out.dtype).fold, *pieces))

    def divide(self, array, number):
        mean = reduction_for(ReduceOp.MEAN, array.dtype)
        self.current_stream().put(partial(mean.finish, self._operand(array), number))

    def launch(self, kernel, blocks, arguments):
        assert blocks > 0
        given = [
            each if isinstance(each, np.generic) else self._operand(each) for each in arguments
        ]
        self.current_stream().put(partial(KERNELS[kernel], blocks, given))
        self.launches.append((kernel, blocks))

    def pinned(self, nbytes):
        self.refuse_capture("memory was allocated")
        held, _ = self._pinned.allocate(nbytes)
        return held[:nbytes]

    def _unheld(self, host):
        """The pinned memory itself: a copy holds it as little as a GPU does."""
        assert type(host) is np.ndarray
        assert self._pinned.owns(address_of(host), host.nbytes), "the host's buffer is not pinned"
        assert host.flags.c_contiguous
        return memory_at(address_of(host), host.size, host.dtype)

    def _copy(self, source, target):
        assert source.ndim == target.ndim == 1
        assert source.size == target.size
        assert source.dtype == target.dtype
        assert source.flags.c_contiguous
        assert target.flags.c_contiguous
        self.current_stream().put(partial(np.copyto, target, source))

    def copy_to_host(self, source, target):
        self._copy(self._operand(source), self._unheld(target))

    def copy_to_device(self, source, target):
        self._copy(self._unheld(source), self._operand(target))

    def allocate_arena(self, nbytes):
        assert nbytes > 0
        assert nbytes % ARENA_UNIT == 0
        memory = self._allocate(nbytes)
        self.open_arenas[address_of(memory)] = _Arena(memory, self.rank, self.uuid(self.device), [])
        return self.at(address_of(memory), nbytes, np.uint8)

    def export_arena(self, arena):
        assert self.open_arenas[address_of(arena)].owner == self.rank
        return f"arena {address_of(arena)}".encode()

    def open_arena(self, handle, nbytes):
        arena = self.open_arenas[int(bytes(handle).split()[1])]
        if arena.owner == self.rank:
            raise RuntimeError("a process can't open the arena that it exported")
        if arena.uuid != self.uuid(self.device):
            raise RuntimeError("the arena lies on another GPU")
        assert arena.memory.nbytes == nbytes
        arena.openers.append(self.rank)
        return self.at(address_of(arena.memory), nbytes, np.uint8)

    def close_arena(self, arena):
        self.open_arenas[address_of(arena)].openers.remove(self.rank)

    def free_arena(self, arena):
        address = address_of(arena)
        assert self.open_arenas[address].owner == self.rank
        if self.open_arenas[address].openers:
            raise RuntimeError("an arena was freed that other processes have open")
        del self.open_arenas[address]
