"""Cross-memory attach: collectives of a node's ranks on ordinary arrays with a single copy.

A rank reads its peers' private memory in place (`peer_memory`). The cache lines transferred between
cores are the program's own, not copies just written to a stage. After an exception in a call, the
caller keeps the rank's arrays (`selector`), because other ranks may still access them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.reductions.reduction import Array, ReduceOp, reduction_for
from collectives.shm.addresses import Addresses, address_of
from collectives.shm.peer_memory import PeerMemory
from collectives.shm.progress import ProgressCounters
from collectives.transports.parts import Lengths, blocks_of, bounds, others, part_starts

# Data are folded while they are in the core's own cache.
_BLOCK_BYTES = 512 << 10


class CrossMemoryAttach:
    """One rank's collectives by cross-memory attach, for the given op and dtype."""

    def __init__(
        self, steps: ProgressCounters, peers: PeerMemory, op: ReduceOp | None, dtype: np.dtype[Any]
    ) -> None:
        self._steps, self._peers = steps, peers
        self._rank, self._size, self._itemsize = steps.rank, steps.size, dtype.itemsize
        self._block = max(1, _BLOCK_BYTES // dtype.itemsize)
        self._gathered: tuple[Any, ...] = None, ()
        if op is not None:
            self._fold = reduction_for(op, dtype).fold_ranks
            self._scratch = [np.empty(self._block, dtype) for _ in range(self._size)]
            self._addresses = list(map(address_of, self._scratch))

    # Reductions

    def all_reduce(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """With two ranks each folds all; with more each folds a slice and copies the others."""
        given = target if source is None else source
        if self._size == 2:
            self._fold_all(addresses, given, target)
        else:
            self._fold_slice(addresses, given, target, None)

    def _read_parts(self, arrays: Sequence[int], edges: Sequence[int], target: Array) -> None:
        """Read every peer's part of its array, given by address, to the same offset in this one."""
        into = address_of(target)
        for peer in others(self._rank, self._size):
            start, nbytes = self._span(edges[peer], edges[peer + 1])
            self._peers.read(peer, arrays[peer] + start, nbytes, into + start)

    def _fold_all(self, addresses: Addresses, given: Array, target: Array) -> None:
        steps, in_place = self._steps, addresses.in_place
        for block in blocks_of(len(target), self._block):
            pieces = self._read_pieces(addresses, given, block)
            if in_place:
                # The peer must have read the block before it is overwritten.
                steps.barrier()
            self._fold(pieces, target[block], self._scratch[self._rank])
        if not in_place:
            steps.barrier()

    def _read_pieces(self, addresses: Addresses, given: Array, block: slice) -> list[Array]:
        """Every rank's elements of a block, in rank order."""
        start, nbytes = self._span(block.start, block.stop)
        pieces = [scratch[: block.stop - block.start] for scratch in self._scratch]
        pieces[self._rank] = given[block]
        for peer in others(self._rank, self._size):
            address = addresses.source_addresses[peer] + start
            self._peers.read(peer, address, nbytes, self._addresses[peer])
        return pieces

    def _fold_part(self, addresses: Addresses, given: Array, start: int, folded: Array) -> None:
        """Fold every rank's elements from `start` on, as many as fit into `folded`."""
        for block in blocks_of(start + len(folded), self._block, start):
            out = folded[block.start - start : block.stop - start]
            pieces = self._read_pieces(addresses, given, block)
            # The own scratch array is unused, because the own elements are not copied.
            self._fold(pieces, out, self._scratch[self._rank])

    def _span(self, first: int, last: int) -> tuple[int, int]:
        """Offset and length in bytes of a range of elements."""
        return first * self._itemsize, (last - first) * self._itemsize

    def reduce(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """Each rank folds a slice, and the root reads the slices."""
        self._fold_slice(addresses, target if source is None else source, target, root)

    def _fold_slice(
        self, addresses: Addresses, given: Array, target: Array, root: int | None
    ) -> None:
        """Fold this rank's slice; read the others', only on the root if one is given."""
        edges = bounds(len(target), self._size, self._itemsize)
        start, stop = edges[self._rank], edges[self._rank + 1]
        self._fold_part(addresses, given, start, target[start:stop])
        self._steps.barrier()
        if root in (None, self._rank):
            self._read_parts(addresses.target_addresses, edges, target)
        self._steps.barrier()

    def reduce_scatter(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """Each rank folds its part; the target is that part alone."""
        assert source is not None
        self._fold_part(addresses, source, sum(lengths[: self._rank]), target)
        self._steps.barrier()

    # Movements

    def broadcast(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """The others read the root's array, except a share that the root writes into theirs."""
        edges = bounds(len(target), self._size, self._itemsize)
        targets, own = addresses.target_addresses, address_of(target)
        start, rest = self._span(edges[-2], edges[-1])
        if self._rank == root:
            for peer in others(root, self._size):
                self._peers.write(peer, targets[peer] + start, rest, own + start)
        else:
            self._peers.read(root, targets[root], start, own)
        self._steps.barrier()

    def all_gather(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """Each rank reads the others' parts."""
        if self._gathered[0] is not addresses or self._gathered[1] != lengths:
            self._gathered = addresses, lengths, *self._parts_at(addresses, lengths)
        _, _, own, parts = self._gathered
        if source is not None:
            target[own] = source
        into = address_of(target)
        for peer, address, nbytes, start in parts:
            self._peers.read(peer, address, nbytes, into + start)
        self._steps.barrier()

    def _parts_at(
        self, addresses: Addresses, lengths: Lengths
    ) -> tuple[slice, list[tuple[int, int, int, int]]]:
        """This rank's part of the result; of the others rank, address, bytes, and start in it."""
        starts = part_starts(lengths)
        parts = []
        for peer in others(self._rank, self._size):
            start, nbytes = self._span(starts[peer], starts[peer + 1])
            address = addresses.source_addresses[peer] + addresses.offset_of_part(peer, start)
            parts.append((peer, address, nbytes, start))
        return slice(starts[self._rank], starts[self._rank + 1]), parts

    def gather(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """The others write their parts into the root's array.

        The root reads them where the address of its array was not exchanged, as that of a new one.
        """
        assert source is not None
        starts, into_root = part_starts(lengths), addresses.target_addresses[root]
        if self._rank == root:
            target[starts[root] : starts[root + 1]] = source
            into = address_of(target)
            for peer in () if into_root else others(root, self._size):
                start, nbytes = self._span(starts[peer], starts[peer + 1])
                self._peers.read(peer, addresses.source_addresses[peer], nbytes, into + start)
        elif into_root:
            start, nbytes = self._span(starts[self._rank], starts[self._rank + 1])
            self._peers.write(root, into_root + start, nbytes, address_of(source))
        self._steps.barrier()

    def scatter(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """The others read their parts of the root's array."""
        first = sum(lengths[: self._rank])
        if source is None:
            address = addresses.source_addresses[root] + first * self._itemsize
            self._peers.read(root, address, target.nbytes, address_of(target))
        else:
            target[:] = source[first : first + len(target)]
        self._steps.barrier()

    def all_to_all_equal(
        self, addresses: Addresses, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """Each rank reads its parts of the others' sources, which hold equal parts."""
        assert source is not None
        rank, into = self._rank, address_of(target)
        own = slice(rank * lengths[0], (rank + 1) * lengths[0])
        start, nbytes = self._span(own.start, own.stop)
        target[own] = source[own]
        for peer in others(rank, self._size):
            at = addresses.source_addresses[peer] + start
            self._peers.read(peer, at, nbytes, into + peer * nbytes)
        self._steps.barrier()
