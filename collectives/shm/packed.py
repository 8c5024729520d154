"""All-reduce of elements that the ranks of a node pack directly into their stages.

The packed elements are folded in place and stored into every rank's stage, from where each rank
unpacks them. Nothing is copied between packing and unpacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from collectives.reductions.buckets import Bucket
from collectives.reductions.reduction import Array, ReduceOp, reduction_for
from collectives.shm.layout import STAGE_BYTES
from collectives.shm.progress import ProgressCounters
from collectives.transports.parts import LINE_BYTES, bounds


class Packed:
    """One rank's reductions of packed elements of one op and dtype, at most `capacity` at once."""

    def __init__(self, steps: ProgressCounters, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self._steps, self._fold = steps, reduction_for(op, dtype).fold_ranks
        self.begin = steps.await_free_stage
        """Returns the parity of the place into which this rank may pack now."""
        self._rank, self._size = steps.rank, steps.size
        most = STAGE_BYTES // dtype.itemsize // self._size + LINE_BYTES
        self._scratch = np.empty(most, dtype)
        self._stages = steps.memory.stages_of(dtype)

    def places(self, length: int) -> list[Place]:
        """Where `length` elements are packed and reduced: one place for each parity."""
        edges = bounds(length, self._size, self._stages[0][0].itemsize)
        own = slice(edges[self._rank], edges[self._rank + 1])
        return [
            Place(
                self._stages[self._rank][parity][:length],
                [stages[parity][own] for stages in self._stages],
                self._rank,
            )
            for parity in (0, 1)
        ]

    def reduce(self, place: Place) -> None:
        """Reduce; the result replaces what this rank packed, until the next `begin`."""
        steps, folded = self._steps, place.own
        steps.mark_written()
        steps.await_written_by_all()
        self._fold(place.slices, folded, self._scratch)
        for theirs in place.others:
            theirs[...] = folded
        steps.finish_step()
        steps.barrier()


class Place:
    """Part of a stage: the memory one rank packs into, and its slice of every stage by rank."""

    def __init__(self, packed: Array, slices: list[Array], rank: int) -> None:
        self.packed, self.slices, self.own = packed, slices, slices[rank]
        self.others = [each for peer, each in enumerate(slices) if peer != rank]


class SharedBucket:
    """A bucket that the ranks of a node pack into their stages and reduce there."""

    def __init__(self, packed: Packed, bucket: Bucket) -> None:
        self._packed, self.dtype = packed, bucket.dtype
        self._places = packed.places(bucket.length)
        self._views = [
            [place.packed[slot.start : slot.stop].reshape(slot.shape) for slot in bucket.slots]
            for place in self._places
        ]
        self.indices = indices = [slot.index for slot in bucket.slots]
        first, last = indices[0], indices[-1]
        # One slice costs less than many indices, of which a single one would give no list.
        consecutive = last - first == len(indices) - 1
        self.pick = itemgetter(slice(first, last + 1)) if consecutive else itemgetter(*indices)

    def reduce(self, arrays: Sequence[Array]) -> list[Array]:
        """The reductions of this bucket's arrays, as views that the next call overwrites."""
        parity = self._packed.begin()
        place = self._places[parity]
        np.concatenate(arrays, axis=None, out=place.packed, casting="no")
        self._packed.reduce(place)
        return self._views[parity]
