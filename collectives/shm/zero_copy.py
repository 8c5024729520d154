"""Zero-copy collectives of a node's ranks, on registered arrays.

A rank reads its peers' buffers and stores results into them directly. The ranks exchange addresses
before each call, because each may pass another buffer. If a necessary buffer is not registered,
nothing is done, and all ranks use another path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.caching import LRU
from collectives.reductions.reduction import Array, ReduceOp, reduction_for
from collectives.shm.addresses import NOWHERE, Addresses
from collectives.shm.pool import Pool
from collectives.shm.progress import ProgressCounters
from collectives.transports.parts import Lengths, blocks_of, bounds, others, own_part, part_starts

# A block of the result stays in the core's own cache until it is stored everywhere.
_BLOCK_BYTES = 128 << 10
# With more ranks, reading all inputs whole costs more than staging slices.
_MOST_READ_WHOLE = 3

# Number of (addresses, length) whose views are kept for the next calls.
_FOLDS_KEPT = 64

_Block = tuple[list[Array], Array, list[Array]]
"""Every rank's input, this rank's output, the outputs of its peers."""

ZeroCopyPath = Callable[[Addresses, Array | None, Array, Lengths, int], bool]


class ZeroCopy:
    """One rank's collectives; each returns False if a necessary buffer is not registered."""

    def __init__(
        self, steps: ProgressCounters, pool: Pool, op: ReduceOp | None, dtype: np.dtype[Any]
    ) -> None:
        self._steps, self._pool, self._dtype = steps, pool, dtype
        self._rank, self._size = steps.rank, steps.size
        if op is not None:
            self._fold = reduction_for(op, dtype).fold_ranks
        self._block = max(1, _BLOCK_BYTES // dtype.itemsize)
        self._scratch = np.empty(self._block, dtype)
        self._folds: LRU[tuple[Any, ...], list[_Block]] = LRU(_FOLDS_KEPT)
        # Of the last call: the next one has the same object if its addresses are the same.
        self._last: tuple[Addresses, int, list[_Block]] = NOWHERE, 0, []

    def _views(self, places: Sequence[int], length: int) -> list[Array]:
        view, dtype = self._pool.view, self._dtype
        return [view(place, peer, length, dtype) for peer, place in enumerate(places)]

    def all_reduce(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> bool:
        """Each rank folds a slice of all arrays and stores it into all."""
        if not all(addresses.sources):
            return False
        if all(addresses.targets):
            self._fold_slice(addresses, len(target))
        elif self._size <= _MOST_READ_WHOLE and not any(addresses.targets):
            # No rank may write its result over an input that another still reads.
            self._fold_all(self._views(addresses.sources, len(target)), target)
        else:
            return False
        self._steps.barrier()
        return True

    def _fold_slice(self, addresses: Addresses, length: int) -> None:
        """2 bytes touched for each byte of the vector."""
        last, count, blocks = self._last
        if last is not addresses or count != length:
            key = (*addresses.sources, *addresses.targets, length)
            found = self._folds.get(key)
            blocks = found or self._folds.put(key, self._make_blocks(addresses, length))
            self._last = addresses, length, blocks
        fold, scratch = self._fold, self._scratch
        for pieces, folded, stores in blocks:
            fold(pieces, folded, scratch)
            for store in stores:
                store[...] = folded

    def _make_blocks(self, addresses: Addresses, length: int) -> list[_Block]:
        """This rank's slice of all inputs and outputs, in blocks."""
        inputs = self._views(addresses.sources, length)
        outputs = self._views(addresses.targets, length)
        edges = bounds(length, self._size, self._dtype.itemsize)
        own = outputs.pop(self._rank)
        return [
            ([each[block] for each in inputs], own[block], [each[block] for each in outputs])
            for block in blocks_of(edges[self._rank + 1], self._block, edges[self._rank])
        ]

    def _fold_all(self, inputs: list[Array], target: Array) -> None:
        """Size + 1 bytes touched for each byte."""
        for block in blocks_of(len(target), self._block):
            pieces = [each[block] for each in inputs]
            self._fold(pieces, target[block], self._scratch)

    def reduce(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> bool:
        """Each rank folds a slice of all arrays and stores it into the root's."""
        if not all(addresses.sources) or not addresses.targets[root]:
            return False
        inputs = self._views(addresses.sources, len(target))
        output = self._pool.view(addresses.targets[root], root, len(target), self._dtype)
        edges = bounds(len(target), self._size, self._dtype.itemsize)
        for block in blocks_of(edges[self._rank + 1], self._block, edges[self._rank]):
            pieces = [each[block] for each in inputs]
            self._fold(pieces, output[block], self._scratch)
        self._steps.barrier()
        return True

    def reduce_scatter(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> bool:
        """Each rank folds its part of all arrays; the target is that part alone."""
        assert source is not None
        if not all(addresses.sources):
            return False
        sources = self._views(addresses.sources, len(source))
        self._fold_all([own_part(each, lengths, self._rank) for each in sources], target)
        self._steps.barrier()
        return True

    def broadcast(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> bool:
        """The others read the root's array, except a share that the root writes into theirs.

        The root writes nothing unless all ranks' arrays are registered.
        """
        if not addresses.targets[root]:
            return False
        length = len(target)
        edges = bounds(length, self._size, self._dtype.itemsize)
        middle = edges[-2] if all(addresses.targets) else length
        if self._rank != root:
            content = self._pool.view(addresses.targets[root], root, length, self._dtype)
            target[:middle] = content[:middle]
        elif middle < length:
            for peer in others(root, self._size):
                view = self._pool.view(addresses.targets[peer], peer, length, self._dtype)
                view[middle:] = target[middle:]
        self._steps.barrier()
        return True

    def all_gather(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> bool:
        """Each rank reads the others' parts, or writes its part into all arrays."""
        starts, rank = part_starts(lengths), self._rank
        own = target[starts[rank] : starts[rank + 1]]
        given = own if source is None else source
        if all(addresses.sources):
            if source is not None:
                own[:] = source
            for peer in others(rank, self._size):
                start = starts[peer] * self._dtype.itemsize
                place = addresses.sources[peer] + addresses.offset_of_part(peer, start)
                theirs = self._pool.view(place, peer, lengths[peer], self._dtype)
                target[starts[peer] : starts[peer + 1]] = theirs
        elif all(addresses.targets):
            outputs = self._views(addresses.targets, len(target))
            del outputs[rank]
            parts = [each[starts[rank] : starts[rank + 1]] for each in outputs]
            self._store(given, parts if source is None else [own, *parts])
        else:
            return False
        self._steps.barrier()
        return True

    def all_to_all_equal(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> bool:
        """Each rank reads its parts of the others' sources, or writes into the others' targets."""
        assert source is not None
        rank, length = self._rank, lengths[0]
        outgoing, incoming = source.reshape(-1, length), target.reshape(-1, length)
        reads = all(addresses.sources)
        if not reads and not all(addresses.targets):
            return False
        places = addresses.sources if reads else addresses.targets
        start = rank * length * self._dtype.itemsize
        incoming[rank] = outgoing[rank]
        for peer in others(rank, self._size):
            theirs = self._pool.view(places[peer] + start, peer, length, self._dtype)
            if reads:
                incoming[peer] = theirs
            else:
                theirs[...] = outgoing[peer]
        self._steps.barrier()
        return True

    def _store(self, content: Array, places: list[Array]) -> None:
        """Copy into several places, block by block: the content is read from memory once."""
        for block in blocks_of(len(content), self._block):
            for place in places:
                place[block] = content[block]
