"""The collectives of a node's ranks on ordinary arrays, which go through the stages.

Each takes (source, target, lengths, root) as a transport's native collective does: flat buffers of
equal dtype, the elements of each rank's part, the input in the target where source is None. All
reductions fold in rank order, here and on the other ways, which therefore give the same bits.

A stage is large on purpose. What a core has just written lies in its own cache, from where another
core reads it at a fraction of the speed at which it reads the shared one: with blocks about as
large as the own cache, most of a block has left it by the time that it is read
(bench/results/README.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from collectives.reductions.reduction import Array, ReduceOp, fold_function, fold_in_order
from collectives.shm.layout import STAGE_BYTES
from collectives.shm.progress import ProgressCounters

Fold = Callable[[Array, Array, Array], Any]
Lengths = Sequence[int]

# A boundary between two ranks' slices, in bytes: no cache line is written by both.
LINE_BYTES = 128


def bounds(length: int, parts: int, itemsize: int) -> list[int]:
    """Where `parts` slices of nearly equal length begin and end, on cache lines."""
    unit = max(1, LINE_BYTES // itemsize)
    lines = -(-length // unit)
    edges = [lines * part // parts * unit for part in range(parts + 1)]
    return [min(edge, length) for edge in edges]


def blocks_of(stop: int, most: int, start: int = 0) -> Iterator[slice]:
    """Slices of at most `most` elements."""
    for first in range(start, stop, most):
        yield slice(first, min(first + most, stop))


def part_starts(lengths: Lengths) -> list[int]:
    """Where each rank's part begins, and the last one's end."""
    return list(accumulate(lengths, initial=0))


class CopyInCopyOut:
    """One rank's collectives through the stages; `op` and `dtype` of its reductions are bound."""

    def __init__(self, steps: ProgressCounters, op: ReduceOp | None, dtype: np.dtype[Any]) -> None:
        self._steps = steps
        self._rank, self._size = steps.rank, steps.size
        self._capacity = STAGE_BYTES // dtype.itemsize
        nbytes = self._capacity * dtype.itemsize
        self._stages = [
            [stage[:nbytes].view(dtype) for stage in stages] for stages in steps.memory.stages
        ]
        self._fold: Fold = _no_fold if op is None else fold_function(op, dtype)
        most = self._capacity // self._size + LINE_BYTES
        self._scratch = np.empty(most, dtype)

    def _own_stage(self) -> Array:
        return self._stages[self._rank][self._steps.begin()]

    def _stage_of(self, peer: int) -> Array:
        return self._stages[peer][self._steps.stage_of(peer)]

    # all_reduce

    def all_reduce(
        self, source: Array | None, target: Array, lengths: Lengths = (), root: int = 0
    ) -> None:
        """Of two ranks each folds everything; of more each folds a slice, and copies the rest."""
        given = target if source is None else source
        run = self._fold_all if self._size == 2 else self._fold_slice
        if len(target) <= self._capacity:
            run(given, target)
            return
        for block in blocks_of(len(target), self._capacity):
            run(given[block], target[block])

    def _fold_all(self, given: Array, target: Array) -> None:
        """5 bytes touched for each byte, and one wait."""
        steps, start = self._steps, self._start(len(target))
        place = slice(start, start + len(target))
        self._own_stage()[place] = given
        steps.written()
        peer = 1 - self._rank
        theirs = self._stage_of(peer)[place]
        pair = (given, theirs) if peer else (theirs, given)
        self._fold(*pair, target)
        steps.read()

    def _start(self, length: int) -> int:
        """Where in the stages a block lies: short ones take turns.

        A place that was not used lately has left the peer's cache, from which storing to it would
        have to take it away.
        """
        quarter = self._capacity // 4
        return self._steps.turn % 4 * quarter if length <= quarter else 0

    def _fold_slice(self, given: Array, target: Array) -> None:
        """5 − 1/size bytes touched for each byte, and two waits."""
        edges = bounds(len(target), self._size, target.itemsize)
        own = slice(edges[self._rank], edges[self._rank + 1])
        self._reduce_slice(given, target[own], edges)
        self._share_slice(target, edges)

    def _reduce_slice(self, given: Array, folded: Array, edges: list[int]) -> None:
        """Fold everybody's elements of this rank's slice of a block."""
        steps, rank = self._steps, self._rank
        self._write_others(given, edges)
        steps.written()
        parity = steps.stages()
        own = slice(edges[rank], edges[rank + 1])
        pieces = [stages[parity][own] for stages in self._stages]
        pieces[rank] = given[own]
        fold_in_order(self._fold, pieces, folded, self._scratch)
        steps.read()

    def _write_others(self, given: Array, edges: list[int]) -> None:
        """Lay down the slices of a block that others fold."""
        stage = self._own_stage()
        before, after = edges[self._rank], edges[self._rank + 1]
        stage[:before] = given[:before]
        stage[after : len(given)] = given[after:]

    def _share_slice(self, target: Array, edges: list[int], root: int | None = None) -> None:
        """Copy everybody's slices of a block; only to the root, if one is given."""
        steps, rank = self._steps, self._rank
        own = slice(edges[rank], edges[rank + 1])
        if root != rank:
            self._own_stage()[own] = target[own]
        steps.written()
        if root is None or root == rank:
            for peer in others(rank, self._size):
                theirs = slice(edges[peer], edges[peer + 1])
                target[theirs] = self._stage_of(peer)[theirs]
        steps.read()

    # reduce and reduce_scatter

    def reduce(
        self, source: Array | None, target: Array, lengths: Lengths = (), root: int = 0
    ) -> None:
        """Each folds a slice, the root copies them."""
        given = target if source is None else source
        for block in blocks_of(len(target), self._capacity):
            edges = bounds(block.stop - block.start, self._size, target.itemsize)
            own = slice(edges[self._rank], edges[self._rank + 1])
            self._reduce_slice(given[block], target[block][own], edges)
            self._share_slice(target[block], edges, root)

    def reduce_scatter(
        self, source: Array | None, target: Array, lengths: Lengths, root: int = 0
    ) -> None:
        """The parts are cut into pieces, so that a stage holds a piece of each.

        The target is this rank's part alone, which may be that of the source.
        """
        assert source is not None
        given = source
        starts = part_starts(lengths)
        most = max(1, self._capacity // self._size)
        for piece in blocks_of(max(lengths), most):
            cuts = [
                slice(start + min(piece.start, length), start + min(piece.stop, length))
                for start, length in zip(starts, lengths, strict=False)
            ]
            self._reduce_piece(given, target[piece], cuts, most)

    def _reduce_piece(self, given: Array, folded: Array, cuts: list[slice], most: int) -> None:
        steps, rank = self._steps, self._rank
        stage = self._own_stage()
        for peer in others(rank, self._size):
            cut = cuts[peer]
            stage[peer * most : peer * most + cut.stop - cut.start] = given[cut]
        steps.written()
        parity = steps.stages()
        place = slice(rank * most, rank * most + len(folded))
        pieces = [stages[parity][place] for stages in self._stages]
        pieces[rank] = given[cuts[rank]]
        fold_in_order(self._fold, pieces, folded, self._scratch)
        steps.read()

    # movements

    def broadcast(
        self, source: Array | None, target: Array, lengths: Lengths = (), root: int = 0
    ) -> None:
        """The root writes blocks, the others read them one step behind."""
        for block in blocks_of(len(target), self._capacity):
            if self._rank == root:
                self._own_stage()[: block.stop - block.start] = target[block]
                self._steps.written()
            else:
                stage = self._stage_of(root)
                target[block] = stage[: block.stop - block.start]
            self._steps.read()

    def all_gather(
        self, source: Array | None, target: Array, lengths: Lengths, root: int = 0
    ) -> None:
        """Everybody writes a block of its part and reads the others'.

        The source is this rank's part alone.
        """
        if source is not None:
            start = sum(lengths[: self._rank])
            target[start : start + len(source)] = source
        self._gather(target, lengths, None)

    def gather(self, source: Array | None, target: Array, lengths: Lengths, root: int = 0) -> None:
        """As `all_gather`, but only the root reads."""
        self._gather(target, lengths, root)

    def _gather(self, target: Array, lengths: Lengths, root: int | None) -> None:
        steps, rank, starts = self._steps, self._rank, part_starts(lengths)
        own = target[starts[rank] : starts[rank + 1]]
        for block in blocks_of(max(lengths), self._capacity):
            if root != rank:
                content = own[block]
                self._own_stage()[: len(content)] = content
            steps.written()
            if root is None or root == rank:
                for peer in others(rank, self._size):
                    place = target[starts[peer] : starts[peer + 1]][block]
                    place[:] = self._stage_of(peer)[: len(place)]
            steps.read()

    def scatter(self, source: Array | None, target: Array, lengths: Lengths, root: int = 0) -> None:
        """The root writes a piece of every part, each of the others reads its own."""
        steps, rank, starts = self._steps, self._rank, part_starts(lengths)
        most = max(1, self._capacity // self._size)
        for piece in blocks_of(max(lengths), most):
            if rank == root:
                stage = self._own_stage()
                for peer in others(rank, self._size):
                    content = target[starts[peer] : starts[peer + 1]][piece]
                    stage[peer * most : peer * most + len(content)] = content
                steps.written()
            else:
                place = target[starts[rank] : starts[rank + 1]][piece]
                stage = self._stage_of(root)
                place[:] = stage[rank * most : rank * most + len(place)]
            steps.read()

    def all_to_all(
        self, source: Array | None, target: Array, lengths: Lengths, root: int = 0
    ) -> None:
        """`lengths`: of the parts that go to each rank, then of those that come from each."""
        steps, rank, size = self._steps, self._rank, self._size
        longest = max(first for first, _ in steps.tell(max(lengths), 0))
        starts = part_starts(lengths)
        parts = [target[start:stop] for start, stop in itertools.pairwise(starts)]
        most = max(1, self._capacity // size)
        for piece in blocks_of(longest, most):
            stage = self._own_stage()
            for peer in others(rank, size):
                content = parts[peer][piece]
                stage[peer * most : peer * most + len(content)] = content
            steps.written()
            for peer in others(rank, size):
                place = parts[size + peer][piece]
                theirs = self._stage_of(peer)
                place[:] = theirs[rank * most : rank * most + len(place)]
            steps.read()


def others(rank: int, size: int) -> Iterator[int]:
    """The other ranks, the next one first, so that not all read the same one at once."""
    for distance in range(1, size):
        yield (rank + distance) % size


def _no_fold(first: Array, second: Array, out: Array) -> None:
    raise AssertionError("a movement folds nothing")
