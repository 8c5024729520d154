"""Collectives in two levels that divide an array among the ranks of each node.

Each rank of a node exchanges its slice with the ranks of equal local rank. Pipelined, the array is
cut in chunks: while one is in transit, the node works on those before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from collectives.reductions.reduction import Array
from collectives.schedules.schedule import split_lengths
from collectives.shm.two_levels import TwoLevels, beside
from collectives.transports.base import Actions
from collectives.transports.parts import blocks_of, own_part

CHUNK_BYTES = 1 << 19
"""Bytes of a chunk. Larger ones overlap less; smaller ones cost more waits."""

Stage = Callable[[slice], None]
"""Works on a chunk of the arrays in one node's memory."""


class NodeSlices(TwoLevels):
    """One rank's collectives, for one op and dtype, as a transport's native collectives."""

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

        def whole() -> None:
            every = slice(len(target))
            enter(every)
            between(every)
            leave(every)

        pipelined = partial(_run_pipelined, chunks, enter, between, leave)
        return self._run_faster(target.nbytes, len(chunks) > 1, whole, pipelined)

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
                on_root = self._levels.local == local
                self._in_node("gather", own, target[block] if on_root else own, slices, local)

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
        beside(partial(between, chunk), following + preceding)
    leave(chunks[-1])


@lru_cache(maxsize=256)
def _slice_lengths(length: int, slices: int, local_size: int) -> tuple[int, ...]:
    """The elements of the slice of each rank of a node; only the first `slices` ranks have one."""
    return tuple(split_lengths(length, slices).tolist()) + (0,) * (local_size - slices)
