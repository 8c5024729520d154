"""Flat buffers on a GPU that many arrays are packed into, to be reduced as one.

Buckets and tables are kept, so that a call that comes again allocates nothing and copies nothing
from the host: it is a launch that packs, a collective and a launch that unpacks.

Calls follow one another, on whatever streams they are made: each waits for the one before, which
may have used the same memory. A call that a graph captures can't: its graph is to be launched where
what it does comes after other calls of the communicator, and before later ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.cuda.interface import Cuda, DeviceArray, Event
from collectives.cuda.kernels import kernel_name, lay_out, make_table, reals
from collectives.reductions.buckets import Bucket, Kinds, make_plan
from collectives.reductions.reduction import ReduceOp, fold_dtype

# A call has one or two: of its arrays, and of its outputs.
_TABLES_KEPT = 8
# Each has as many bytes as the arrays of a call.
_SETS_KEPT = 4


class Table(NamedTuple):
    """Where a bucket's arrays lie, for one launch."""

    rows: DeviceArray
    blocks: int


class DeviceBucket:
    """A buffer for arrays of one dtype, and the tables that were used last."""

    def __init__(
        self, memory: BucketMemory, dtype: np.dtype[Any], indices: list[int], bucket: Bucket
    ) -> None:
        """`indices` are the arrays' numbers in the call, `dtype` is theirs."""
        self._memory, self.indices = memory, indices
        factor = reals(bucket.dtype)
        self._lengths = [(slot.stop - slot.start) * factor for slot in bucket.slots]
        self._starts, length = lay_out(self._lengths, bucket.dtype.itemsize // factor)
        self.flat = memory.empty(length // factor, bucket.dtype)
        # What lies between arrays is reduced with them, and stays zero by every op. Whatever was in
        # that memory before would grow call by call, and might slow down or warn who reduces it.
        self.flat.view(np.uint8)[...] = 0
        self._pack = kernel_name("pack", dtype, bucket.dtype)
        self._unpack = kernel_name("unpack", bucket.dtype, bucket.dtype)
        self._tables: OrderedDict[tuple[int, ...], Table] = OrderedDict()

    def table(self, arrays: Sequence[DeviceArray]) -> Table:
        """For this bucket's arrays, or outputs: flat, contiguous, of one dtype."""
        dtype = arrays[0].dtype
        itemsize = dtype.itemsize // reals(dtype)
        addresses = tuple(map(self._memory.cuda.address, arrays))
        key = (itemsize, *addresses)
        table = self._tables.get(key)
        if table is None:
            table = self._memory.upload(
                make_table(addresses, self._starts, self._lengths, itemsize)
            )
            self._tables[key] = table
            if len(self._tables) > _TABLES_KEPT:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        return table

    def pack(self, table: Table) -> None:
        """Put the launch on the current stream."""
        self._memory.cuda.launch(self._pack, table.blocks, (table.rows, self.flat))

    def unpack(self, table: Table) -> None:
        """Put the launch on the current stream."""
        self._memory.cuda.launch(self._unpack, table.blocks, (table.rows, self.flat))


class BucketSet(NamedTuple):
    """How the arrays of a call travel."""

    buckets: list[DeviceBucket]
    alone: list[int]
    """The numbers of those that share no bucket."""


class BucketMemory:
    """The buckets of one communicator."""

    def __init__(self, cuda: Cuda) -> None:
        """All memory is of the current GPU."""
        self.cuda = cuda
        # Nothing runs on it. CuPy hands out again what is given back to whoever allocates on the
        # same stream, at once: here this is a later call, which waits for those before it.
        self._stream = cuda.new_stream()
        self._sets: OrderedDict[tuple[Kinds, int, bool], BucketSet] = OrderedDict()
        self._last: Event | None = None
        self._uploads: list[tuple[Event, NDArray[np.uint8]]] = []
        self._captured: list[Any] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within it the current stream comes after the calls before, and later ones after it."""
        stream = self.cuda.current_stream()
        if stream.capturing():
            # An event from outside its capture can't be waited for, nor the other way round.
            yield
            return
        if self._last is not None:
            stream.wait(self._last)
        try:
            yield
        finally:
            self._last = stream.record()

    def set_for(self, kinds: Kinds, limit: int, op: ReduceOp) -> BucketSet:
        """The buckets for arrays of these kinds; they are cut the same on all ranks."""
        key = (kinds, limit, op is ReduceOp.MEAN)  # the other ops have the same buckets
        found = self._sets.get(key)
        if found is not None:
            self._sets.move_to_end(key)
            return found
        self._refuse_in_capture()
        if len(self._sets) >= _SETS_KEPT:
            self._sets.popitem(last=False)
        found = self._sets[key] = self._make_set(kinds, limit, op)
        return found

    def _make_set(self, kinds: Kinds, limit: int, op: ReduceOp) -> BucketSet:
        """As `make_plan`, but arrays of several dtypes share none that they are folded in."""
        made = BucketSet([], [])
        for dtype in dict.fromkeys(dtype for _, dtype in kinds):
            numbers = [index for index, kind in enumerate(kinds) if kind[1] == dtype]
            folded = tuple((kinds[index][0], fold_dtype(op, dtype)) for index in numbers)
            for bucket in make_plan(folded, limit).buckets:
                indices = [numbers[slot.index] for slot in bucket.slots]
                if len(indices) == 1:
                    made.alone.extend(indices)
                elif bucket.length:
                    made.buckets.append(DeviceBucket(self, dtype, indices, bucket))
        return made

    def empty(self, length: int, dtype: np.dtype[Any]) -> DeviceArray:
        """New memory, to be written by the call whose turn it is."""
        with self.cuda.on(self._stream):
            return self.cuda.empty(length, dtype)

    def upload(self, rows: NDArray[np.int64]) -> Table:
        """A table on the GPU. RuntimeError in a capture."""
        self._refuse_in_capture()
        self._uploads = [upload for upload in self._uploads if not upload[0].done()]
        pinned = self.cuda.pinned(rows.nbytes)
        pinned.view(np.int64)[:] = rows.reshape(-1)
        table = Table(self.empty(rows.size, rows.dtype), len(rows))
        self.cuda.copy_to_device(pinned.view(np.int64), table.rows)
        # The pool of pinned memory doesn't know of the copy.
        self._uploads.append((self.cuda.current_stream().record(), pinned))
        return table

    def _refuse_in_capture(self) -> None:
        if self.cuda.current_stream().capturing():
            raise RuntimeError(
                "all_reduce_many: a graph that is captured has no memory for buckets: make the call"
                " once before the capture, with the same arrays and the same `out`"
            )

    def keep(self, *used: Any) -> None:
        """Hold what a graph may have captured as long as the communicator: it runs again."""
        if self.cuda.current_stream().capturing():
            self._captured.extend(used)
