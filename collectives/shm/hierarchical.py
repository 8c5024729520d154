"""Collectives in two levels: in the memory of each node, and between ranks of equal local rank.

Every byte crosses the link between two nodes as often as if each node were one rank.

Large arrays are pipelined: while the messages of one chunk are in transit, the ranks of a node work
on the chunks before and after it, in the same order. A rank that waits for messages goes on with
that work, so that no rank waits for a message of a rank that waits for it in the node's memory.
Chunks cost more waits: where cores are short, or the link is as fast as the memory, whole arrays
are faster. Both are tried, where they give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from collectives.reductions.reduction import Array, ReduceOp, reduction_for
from collectives.schedules.paths import HIERARCHICAL, PIPELINED
from collectives.schedules.schedule import split_lengths
from collectives.shm.copy_in_copy_out import blocks_of, part_starts
from collectives.shm.levels import Levels
from collectives.shm.online_tuning import PathTimes
from collectives.transports.base import Actions, own_part

CHUNK_BYTES = 1 << 19
"""Bytes of a chunk. Larger ones overlap less; smaller ones cost more waits."""

InNode = Callable[[Array | None, Array, Sequence[int], int], str | None]
"""As a native collective; returns the name of the data path that it took."""

Stage = Callable[[slice], None]
"""Works on a chunk of the arrays in one node's memory."""


class Hierarchical:
    """One rank's collectives, for one op and dtype, as a transport's native collectives."""

    def __init__(
        self,
        levels: Levels,
        in_node: Callable[[str], InNode],
        op: ReduceOp | None,
        dtype: np.dtype[Any],
    ) -> None:
        """`in_node` returns a collective of the node's ranks alone, which only folds."""
        self._levels, self._collective, self._dtype = levels, in_node, dtype
        self._reduction = None if op is None else reduction_for(op, dtype)
        self._op = None if self._reduction is None else self._reduction.folds_as
        # Between more nodes a schedule folds the parts of an array in different orders. Between two
        # only the payload of a NaN may differ.
        self._any_order = op is None or len(levels.members) == 2 or dtype.kind in "biu"
        self._times: dict[int, PathTimes] = {}
        """Of the arrays of about as many chunks."""

    def find(self, collective: str) -> InNode | None:
        """The collective, or None if it is not made in two levels with these nodes."""
        levels = self._levels
        if collective in ("reduce_scatter", "all_gather"):
            # The parts of a node's ranks must lie side by side.
            if not (levels.even and levels.in_order and levels.local_size > 1):
                return None
        elif collective not in ("all_reduce", "reduce", "broadcast"):
            return None
        found: InNode = getattr(self, f"_{collective}")
        return found

    def _in_node(
        self,
        collective: str,
        source: Array | None,
        target: Array,
        lengths: Sequence[int],
        root: int = 0,
    ) -> None:
        if self._levels.local_size > 1:
            self._collective(collective)(source, target, lengths, root)
        elif source is not None:
            target[:] = source

    def _between(
        self,
        collective: str,
        source: Array | None,
        target: Array,
        root: int = 0,
        lengths: Sequence[int] | None = None,
        overlapped: Actions | None = None,
    ) -> None:
        across = self._levels.across
        if across is not None:
            across.run(
                collective,
                source,
                target,
                lengths=lengths,
                op=self._op,
                root=root,
                overlapped=overlapped,
            )

    def _finish(self, folded: Array) -> None:
        assert self._reduction is not None
        self._reduction.finish(folded, len(self._levels.places))

    def _slices(self, chunk: Array) -> tuple[Sequence[int], Array]:
        """The elements of each local rank's slice of a chunk, and this rank's slice."""
        levels = self._levels
        lengths = _slice_lengths(len(chunk), levels.slices, levels.local_size)
        return lengths, own_part(chunk, lengths, levels.local)

    def _in_stages(
        self, target: Array, enter: Stage, collective: str, leave: Stage, node: int = 0
    ) -> str:
        """Run `enter`, the collective of this rank's slices between nodes, and `leave`; how."""

        def between(block: slice, overlapped: Actions | None = None) -> None:
            _, own = self._slices(target[block])
            self._between(collective, None, own, node, overlapped=overlapped)

        chunks = list(blocks_of(len(target), max(1, CHUNK_BYTES // target.itemsize)))

        def run(path: str) -> str:
            if path == PIPELINED:
                _run_pipelined(chunks, enter, between, leave)
            else:
                whole = slice(len(target))
                enter(whole)
                between(whole)
                leave(whole)
            return path

        if len(chunks) < 2:
            return run(HIERARCHICAL)
        if not self._any_order:
            return run(PIPELINED)
        size = len(chunks).bit_length()
        times = self._times.setdefault(size, PathTimes((PIPELINED, HIERARCHICAL)))
        return times.run(run, self._levels.longest)

    def _all_reduce(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> str:
        """Reduce-scatter on the node, all-reduce of each slice between nodes, all-gather again."""

        def leave(block: slice) -> None:
            slices, own = self._slices(target[block])
            self._finish(own)
            self._in_node("all_gather", None, target[block], slices)

        return self._in_stages(target, self._reduce_slices(source, target), "all_reduce", leave)

    def _reduce_slices(self, source: Array | None, target: Array) -> Stage:
        """Every rank of the node folds its slice."""
        given = target if source is None else source

        def enter(block: slice) -> None:
            slices, own = self._slices(target[block])
            self._in_node("reduce_scatter", given[block], own, slices)

        return enter

    def _reduce(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> str:
        """Like `_all_reduce`, to the root's node and there to the root. All targets change."""
        node, local = self._levels.places[root]

        def leave(block: slice) -> None:
            if node == self._levels.node:
                slices, own = self._slices(target[block])
                self._finish(own)
                self._in_node("gather", None, target[block], slices, local)

        return self._in_stages(target, self._reduce_slices(source, target), "reduce", leave, node)

    def _broadcast(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> str:
        """On the root's node, of each slice between nodes, all-gather on the others."""
        node, local = self._levels.places[root]

        def enter(block: slice) -> None:
            if node == self._levels.node:
                self._in_node("broadcast", None, target[block], (), local)

        def leave(block: slice) -> None:
            if node != self._levels.node:
                slices, _ = self._slices(target[block])
                self._in_node("all_gather", None, target[block], slices)

        return self._in_stages(target, enter, "broadcast", leave, node)

    def _parts(self, lengths: Sequence[int]) -> tuple[list[int], list[tuple[slice, Sequence[int]]]]:
        """The lengths of the parts of this local rank on all nodes; the nodes' blocks and parts."""
        count, starts = self._levels.local_size, part_starts(lengths)
        blocks = [
            (slice(starts[first], starts[first + count]), lengths[first : first + count])
            for first in range(0, len(lengths), count)
        ]
        return [parts[self._levels.local] for _, parts in blocks], blocks

    def _reduce_scatter(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> None:
        """On the node for the ranks of one node after the other, then between nodes."""
        assert source is not None
        own, blocks = self._parts(lengths)
        folded, starts = self._levels.work(sum(own), self._dtype), part_starts(own)
        for index, (block, parts) in enumerate(blocks):
            part = folded[starts[index] : starts[index + 1]]
            self._in_node("reduce_scatter", source[block], part, parts)
        self._between("reduce_scatter", folded, target, lengths=own)
        self._finish(target)

    def _all_gather(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> None:
        """Between nodes, then on the node of the ranks of one node after the other."""
        levels = self._levels
        if source is None:
            rank = levels.members[levels.node][levels.local]
            source = own_part(target, lengths, rank)
        own, blocks = self._parts(lengths)
        joined, starts = levels.work(sum(own), self._dtype), part_starts(own)
        self._between("all_gather", source, joined, lengths=own)
        for index, (block, parts) in enumerate(blocks):
            part = joined[starts[index] : starts[index + 1]]
            self._in_node("all_gather", part, target[block], parts)


def _run_pipelined(
    chunks: Sequence[slice],
    enter: Stage,
    between: Callable[[slice, Actions], None],
    leave: Stage,
) -> None:
    enter(chunks[0])
    for index, chunk in enumerate(chunks):
        following = [partial(enter, each) for each in chunks[index + 1 : index + 2]]
        preceding = [partial(leave, each) for each in chunks[max(0, index - 1) : index]]
        overlapped = iter(following + preceding)
        between(chunk, overlapped)
        for action in overlapped:
            action()
    leave(chunks[-1])


@lru_cache(maxsize=256)
def _slice_lengths(length: int, slices: int, local_size: int) -> tuple[int, ...]:
    """The elements of the slice of each rank of a node; only the first `slices` ranks have one."""
    return tuple(split_lengths(length, slices).tolist()) + (0,) * (local_size - slices)
