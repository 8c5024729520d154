"""Flat buckets on a GPU, into which many arrays are packed to be reduced as one.

Buckets and tables are kept, so that a repeated call allocates nothing and copies nothing from the
host: it is one launch that packs, a collective and one launch that unpacks.

Calls are ordered on whatever streams they are made: each waits for the one before, which may have
used the same memory. A call captured in a graph can't wait: its graph must be launched after the
earlier calls of the communicator, asynchronous ones after their `wait`, and before the later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.caching import LRU
from collectives.cuda.interface import Cuda, DeviceArray, Event
from collectives.cuda.kernels import kernel_name, lay_out, make_table, reals
from collectives.gpu.ordered_memory import OrderedMemory
from collectives.reductions.buckets import Bucket, Kinds, make_buckets
from collectives.reductions.reduction import ReduceOp, reduction_for

# A call uses one or two: of its arrays, and of its outputs.
_TABLES_KEPT = 8
# Each set has as many bytes as the arrays of a call.
_SETS_KEPT = 4


class Table(NamedTuple):
    """The addresses of a bucket's arrays, for one launch."""

    rows: DeviceArray
    blocks: int


class DeviceBucket:
    """A buffer for arrays of one dtype, and its recently used tables."""

    def __init__(
        self, memory: BucketMemory, dtype: np.dtype[Any], indices: list[int], bucket: Bucket
    ) -> None:
        """`indices` are the arrays' indices in the call, `dtype` is their dtype."""
        self._memory, self.indices = memory, indices
        factor = reals(bucket.dtype)
        self._lengths = [(slot.stop - slot.start) * factor for slot in bucket.slots]
        self._starts, length = lay_out(self._lengths, bucket.dtype.itemsize // factor)
        self.flat = memory.empty(length // factor, bucket.dtype)
        # The padding is reduced as well, and stays zero under every op. Uninitialised padding would
        # grow with every call, and could cause slow arithmetic or warnings.
        self.flat.view(np.uint8)[...] = 0
        self._pack = kernel_name("pack", dtype, bucket.dtype)
        self._unpack = kernel_name("unpack", bucket.dtype, bucket.dtype)
        self._tables: LRU[tuple[int, ...], Table] = LRU(_TABLES_KEPT)

    def table(self, arrays: Sequence[DeviceArray]) -> Table:
        """The table of this bucket's arrays, or outputs: flat, contiguous, of one dtype."""
        return self.table_at(tuple(map(self._memory.cuda.address, arrays)), arrays[0].dtype)

    def table_at(self, addresses: tuple[int, ...], dtype: np.dtype[Any]) -> Table:
        """As `table`, of arrays at these addresses."""
        itemsize = dtype.itemsize // reals(dtype)
        key = (itemsize, *addresses)
        table = self._tables.recall(key)
        if table is None:
            made = make_table(addresses, self._starts, self._lengths, itemsize)
            return self._tables.put(key, self._memory.upload(made))
        return table

    def pack(self, table: Table) -> None:
        """Launch the kernel on the current stream."""
        self._memory.cuda.launch(self._pack, table.blocks, (table.rows, self.flat))

    def unpack(self, table: Table) -> None:
        """Launch the kernel on the current stream."""
        self._memory.cuda.launch(self._unpack, table.blocks, (table.rows, self.flat))


class BucketSet(NamedTuple):
    """The buckets of a call, and the arrays outside them."""

    buckets: list[DeviceBucket]
    alone: list[int]
    """Indices of the arrays that share no bucket."""


class BucketMemory(OrderedMemory):
    """The buckets of one communicator."""

    def __init__(self, cuda: Cuda) -> None:
        """All memory is on the current GPU."""
        super().__init__(cuda)
        self._sets: LRU[tuple[Kinds, int, bool], BucketSet] = LRU(_SETS_KEPT)
        self._uploads: list[tuple[Event, NDArray[np.uint8]]] = []
        self._captured: list[Any] = []

    def set_for(self, kinds: Kinds, limit: int, op: ReduceOp) -> BucketSet:
        """The buckets for arrays of these kinds; all ranks divide them alike."""
        divides = reduction_for(op, kinds[0][1], True).divides
        key = (kinds, limit, divides)  # the ops that don't divide have the same buckets
        found = self._sets.recall(key)
        if found is None:
            self._refuse_in_capture()
            found = self._sets.put(key, self._make_set(kinds, limit, op))
        return found

    def _make_set(self, kinds: Kinds, limit: int, op: ReduceOp) -> BucketSet:
        """Like `make_buckets`, with separate buckets for different dtypes of equal fold dtype."""
        made = BucketSet([], [])
        for dtype in dict.fromkeys(dtype for _, dtype in kinds):
            numbers = [index for index, kind in enumerate(kinds) if kind[1] == dtype]
            folded = tuple(
                (kinds[index][0], reduction_for(op, dtype, True).dtype) for index in numbers
            )
            for bucket in make_buckets(folded, limit):
                indices = [numbers[slot.index] for slot in bucket.slots]
                if len(indices) == 1:
                    made.alone.extend(indices)
                elif bucket.length:
                    made.buckets.append(DeviceBucket(self, dtype, indices, bucket))
        return made

    def upload(self, rows: NDArray[np.int64]) -> Table:
        """A table on the GPU; RuntimeError during a capture."""
        self._refuse_in_capture()
        self._uploads = [upload for upload in self._uploads if not upload[0].done()]
        pinned = self.cuda.pinned(rows.nbytes)
        pinned.view(np.int64)[:] = rows.reshape(-1)
        table = Table(self.empty(rows.size, rows.dtype), len(rows))
        self.cuda.copy_to_device(pinned.view(np.int64), table.rows)
        # Kept until the copy is done, of which the pool of pinned memory is not aware.
        self._uploads.append((self.cuda.current_stream().record(), pinned))
        return table

    def _refuse_in_capture(self) -> None:
        if self.cuda.current_stream().capturing():
            raise RuntimeError(
                "all_reduce_many: a graph that is captured has no memory for buckets: make the call"
                " once before the capture, with the same arrays and the same `out`"
            )

    def keep(self, *used: Any) -> None:
        """Keep objects that a captured graph uses as long as the communicator."""
        if self.cuda.current_stream().capturing():
            self._captured.extend(used)
