"""Copy-in/copy-out: collectives of a node's ranks on ordinary arrays, through the stages.

Each takes (source, target, lengths, root) like a transport's native collective: flat buffers of
equal dtype, the elements of each rank's part, and the input in the target if source is None. All
reductions fold in rank order, on every path, which therefore give the same bits.

A stage is large on purpose. Data that a core has just written are in its own cache, from where
another core reads them at a fraction of the speed of the shared cache. With blocks about as large
as the own cache, most of a block has been evicted from it by the time that it is read
(bench/results/README.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.reductions.reduction import Array, ReduceOp, reduction_for
from collectives.shm.layout import STAGE_BYTES
from collectives.shm.migratory import take_lines
from collectives.shm.progress import ProgressCounters
from collectives.transports.parts import (
    LINE_BYTES,
    Lengths,
    blocks_of,
    bounds,
    others,
    parts_by_rank,
)


class CopyInCopyOut:
    """One rank's collectives through the stages, for the given op and dtype."""

    def __init__(
        self,
        steps: ProgressCounters,
        op: ReduceOp | None,
        dtype: np.dtype[Any],
        *,
        migratory: bool = False,
    ) -> None:
        """`migratory`: a rank takes the lines that it has read (`migratory`). Of two ranks only."""
        assert not migratory or steps.size == 2
        self._steps, self._migratory = steps, migratory
        self._rank, self._size = steps.rank, steps.size
        self._capacity = STAGE_BYTES // dtype.itemsize
        self._stages = steps.memory.stages_of(dtype)
        if op is not None:
            self._fold = reduction_for(op, dtype).fold_ranks
        most = self._capacity // self._size + LINE_BYTES
        self._scratch = np.empty(most, dtype)

    def _own_stage(self) -> Array:
        return self._stages[self._rank][self._steps.await_free_stage()]

    def _stage_of(self, peer: int) -> Array:
        return self._stages[peer][self._steps.await_written_by(peer)]

    def _has_read(self, content: Array) -> None:
        """Called with what this rank has read of the other one's stage."""
        if self._migratory:
            take_lines(content)

    # all_reduce

    def all_reduce(self, source: Array | None, target: Array, lengths: Lengths, root: int) -> None:
        """With two ranks each folds all; with more each folds a slice and copies the others."""
        given = target if source is None else source
        run = self._fold_all if self._size == 2 else self._fold_slice
        if len(target) <= self._capacity:
            run(given, target)
            return
        for block in blocks_of(len(target), self._capacity):
            run(given[block], target[block])

    def _fold_all(self, given: Array, target: Array) -> None:
        """5 bytes touched for each byte, and one wait."""
        steps, peer = self._steps, 1 - self._rank
        self._own_stage()[: len(target)] = given
        steps.mark_written()
        peer_block = self._stage_of(peer)[: len(target)]
        pair = (given, peer_block) if peer else (peer_block, given)
        self._fold(pair, target, self._scratch)
        self._has_read(peer_block)
        steps.finish_step()

    def _fold_slice(self, given: Array, target: Array, root: int | None = None) -> None:
        """5 − 1/size bytes touched for each byte, and two waits, without a root."""
        edges = bounds(len(target), self._size, target.itemsize)
        own = slice(edges[self._rank], edges[self._rank + 1])
        self._write_others(given, edges)
        self._fold_stages(own, given[own], target[own])
        self._share_slice(target, edges, root)

    def _fold_stages(self, place: slice, given: Array, folded: Array) -> None:
        """Fold what lies there in the other ranks' stages with this rank's elements."""
        steps, rank = self._steps, self._rank
        steps.mark_written()
        parity = steps.await_written_by_all()
        pieces = [stages[parity][place] for stages in self._stages]
        pieces[rank] = given
        self._fold(pieces, folded, self._scratch)
        self._has_read(pieces[rank - 1])
        steps.finish_step()

    def _write_others(self, given: Array, edges: Sequence[int]) -> None:
        """Write the slices of a block that other ranks fold."""
        stage = self._own_stage()
        before, after = edges[self._rank], edges[self._rank + 1]
        stage[:before] = given[:before]
        stage[after : len(given)] = given[after:]

    def _share_slice(self, target: Array, edges: Sequence[int], root: int | None) -> None:
        """Copy every rank's slice of a block; only on the root, if one is given."""
        steps, rank = self._steps, self._rank
        own = slice(edges[rank], edges[rank + 1])
        if root != rank:
            self._own_stage()[own] = target[own]
        steps.mark_written()
        if root is None or root == rank:
            for peer in others(rank, self._size):
                slice_of_peer = slice(edges[peer], edges[peer + 1])
                content = self._stage_of(peer)[slice_of_peer]
                target[slice_of_peer] = content
                self._has_read(content)
        steps.finish_step()

    # reduce and reduce_scatter

    def reduce(self, source: Array | None, target: Array, lengths: Lengths, root: int) -> None:
        """Each rank folds a slice, and the root copies the slices."""
        given = target if source is None else source
        for block in blocks_of(len(target), self._capacity):
            self._fold_slice(given[block], target[block], root)

    def reduce_scatter(
        self, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """The parts are cut into pieces, so that a stage holds a piece of each part.

        The target is this rank's part alone; it may be the source's memory.
        """
        rank, parts = self._rank, parts_by_rank(source, lengths)
        most = max(1, self._capacity // self._size)
        for piece in blocks_of(max(lengths), most):
            folded = target[piece]
            self._write_pieces(parts, piece, most)
            place = slice(rank * most, rank * most + len(folded))
            self._fold_stages(place, parts[rank][piece], folded)

    def _write_pieces(self, parts: Sequence[Array], piece: slice, most: int) -> None:
        """Write a piece of each other rank's part, `most` elements apart."""
        stage = self._own_stage()
        for peer in others(self._rank, self._size):
            content = parts[peer][piece]
            stage[peer * most : peer * most + len(content)] = content

    # movements

    def broadcast(self, source: Array | None, target: Array, lengths: Lengths, root: int) -> None:
        """The root writes blocks; the others read them one step later."""
        for block in blocks_of(len(target), self._capacity):
            if self._rank == root:
                self._own_stage()[: block.stop - block.start] = target[block]
                self._steps.mark_written()
            else:
                content = self._stage_of(root)[: block.stop - block.start]
                target[block] = content
                self._has_read(content)
            self._steps.finish_step()

    def all_gather(self, source: Array | None, target: Array, lengths: Lengths, root: int) -> None:
        """Every rank writes a block of its part and reads the others'.

        The source is this rank's part alone. It is copied to the target while the others write.
        """
        self._gather(source, target, lengths, None)

    def gather(self, source: Array | None, target: Array, lengths: Lengths, root: int) -> None:
        """Like `all_gather`, but only the root reads."""
        self._gather(source, target, lengths, root)

    def _gather(
        self, source: Array | None, target: Array, lengths: Lengths, root: int | None
    ) -> None:
        steps, rank, gets = self._steps, self._rank, root in (None, self._rank)
        parts = parts_by_rank(target, lengths) if gets else []
        given = parts[rank] if source is None else source
        for block in blocks_of(max(lengths), self._capacity):
            if root != rank:
                content = given[block]
                self._own_stage()[: len(content)] = content
            steps.mark_written()
            if gets:
                if source is not None:
                    parts[rank][block] = source[block]
                for peer in others(rank, self._size):
                    part = parts[peer][block]
                    part[:] = content = self._stage_of(peer)[: len(part)]
                    self._has_read(content)
            steps.finish_step()

    def scatter(self, source: Array | None, target: Array, lengths: Lengths, root: int) -> None:
        """The root writes a piece of every part; each other rank reads its own."""
        steps, rank = self._steps, self._rank
        parts = [] if source is None else parts_by_rank(source, lengths)
        most = max(1, self._capacity // self._size)
        for piece in blocks_of(max(lengths), most):
            part = target[piece]
            if rank == root:
                self._write_pieces(parts, piece, most)
                steps.mark_written()
                part[:] = parts[rank][piece]
            else:
                start = rank * most
                part[:] = content = self._stage_of(root)[start : start + len(part)]
                self._has_read(content)
            steps.finish_step()

    def all_to_all(self, source: Array | None, target: Array, lengths: Lengths, root: int) -> None:
        """`lengths` holds the parts to each rank, then the parts from each rank."""
        longest = max(first for first, _ in self._steps.exchange_numbers(max(lengths), 0))
        parts = parts_by_rank(target, lengths)
        self._exchange(parts[: self._size], parts[self._size :], longest)

    def all_to_all_equal(
        self, source: Array | None, target: Array, lengths: Lengths, root: int
    ) -> None:
        """Like `all_to_all`, of parts of one length: the source holds those that are sent."""
        assert source is not None
        length = lengths[0]
        self._exchange(list(source.reshape(-1, length)), list(target.reshape(-1, length)), length)

    def _exchange(self, outgoing: Sequence[Array], incoming: Sequence[Array], longest: int) -> None:
        steps, rank = self._steps, self._rank
        most = max(1, self._capacity // self._size)
        for piece in blocks_of(longest, most):
            self._write_pieces(outgoing, piece, most)
            steps.mark_written()
            incoming[rank][piece] = outgoing[rank][piece]
            for peer in others(rank, self._size):
                part, start = incoming[peer][piece], rank * most
                part[:] = content = self._stage_of(peer)[start : start + len(part)]
                self._has_read(content)
            steps.finish_step()
