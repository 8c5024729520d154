"""Collectives in two levels: in the memory of each node, and between ranks of equal local rank.

Every byte crosses the link between two nodes as often as if each node were one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from collectives.reductions.reduction import Array, ReduceOp, reduction_for
from collectives.schedules.schedule import split_lengths
from collectives.shm.copy_in_copy_out import part_starts
from collectives.transports.base import Native, own_part

Work = Callable[[int, np.dtype[Any]], Array]
"""A flat buffer for intermediate results."""

InNode = Callable[[Array | None, Array, Sequence[int], int], str | None]
"""As a native collective; returns the name of the data path that it took."""


class Across(Protocol):
    """The ranks of equal local rank on all nodes."""

    def run(
        self,
        collective: str,
        source: Array | None,
        target: Array,
        *,
        lengths: Sequence[int] | None = None,
        op: ReduceOp | None = None,
        root: int = 0,
    ) -> object:
        """As `Engine.run`."""

    def close(self) -> None:
        """Release the transport. Collective."""


class Levels:
    """The place of one rank in both levels."""

    def __init__(
        self, members: Sequence[Sequence[int]], rank: int, across: Across | None, work: Work
    ) -> None:
        """`members` holds the ranks of each node; `across` is None on ranks that have no slice.

        A node has as many slices as the smallest one has ranks.
        """
        self.members, self.across, self.work = members, across, work
        self.slices = min(map(len, members))
        self.places = {
            each: (node, local)
            for node, ranks in enumerate(members)
            for local, each in enumerate(ranks)
        }
        """The node and the local rank of each rank."""
        self.node, self.local = self.places[rank]
        self.local_size = len(members[self.node])
        self.in_order = [rank for ranks in members for rank in ranks] == sorted(self.places)
        self.even = len(set(map(len, members))) == 1
        """Whether all nodes have as many ranks."""


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

    def find(self, collective: str) -> Native | None:
        """The collective, or None if it is not made in two levels with these nodes."""
        levels = self._levels
        if collective in ("reduce_scatter", "all_gather"):
            # The parts of a node's ranks must lie side by side.
            if not (levels.even and levels.in_order and levels.local_size > 1):
                return None
        elif collective not in ("all_reduce", "reduce", "broadcast"):
            return None
        found: Native = getattr(self, f"_{collective}")
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
    ) -> None:
        across = self._levels.across
        if across is not None:
            across.run(collective, source, target, lengths=lengths, op=self._op, root=root)

    def _finish(self, folded: Array) -> None:
        assert self._reduction is not None
        self._reduction.finish(folded, len(self._levels.places))

    def _slices(self, target: Array) -> tuple[list[int], Array]:
        """The elements of each local rank's slice, and this rank's."""
        levels = self._levels
        none = [0] * (levels.local_size - levels.slices)
        lengths = [*split_lengths(len(target), levels.slices).tolist(), *none]
        return lengths, own_part(target, lengths, levels.local)

    def _all_reduce(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> None:
        """Reduce-scatter on the node, all-reduce of each slice between nodes, all-gather again."""
        slices, own = self._slices(target)
        self._in_node("reduce_scatter", target if source is None else source, own, slices)
        self._between("all_reduce", None, own)
        self._finish(own)
        self._in_node("all_gather", None, target, slices)

    def _reduce(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> None:
        """Like `_all_reduce`, to the root's node and there to the root. All targets change."""
        node, local = self._levels.places[root]
        slices, own = self._slices(target)
        self._in_node("reduce_scatter", target if source is None else source, own, slices)
        self._between("reduce", None, own, node)
        if node == self._levels.node:
            self._finish(own)
            self._in_node("gather", None, target, slices, local)

    def _broadcast(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> None:
        """On the root's node, of each slice between nodes, all-gather on the others."""
        node, local = self._levels.places[root]
        slices, own = self._slices(target)
        if node == self._levels.node:
            self._in_node("broadcast", None, target, (), local)
        self._between("broadcast", None, own, node)
        if node != self._levels.node:
            self._in_node("all_gather", None, target, slices)

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
