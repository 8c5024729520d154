"""Collectives in two levels that work on the block of one node's ranks after the other.

Pipelined, each rank exchanges one part with each of the other nodes in turn, as a pairwise
exchange (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005): while one block's parts are in transit, the node works on the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from collectives.reductions.reduction import Action, Array
from collectives.shm.two_levels import Path, TwoLevels, beside
from collectives.transports.parts import own_part, part_starts, parts_by_rank

LEAST_PART = 1 << 18
"""Bytes of a rank's part, on average, from which on blocks are pipelined: waits cost more else."""


class NodeBlocks(TwoLevels):
    """One rank's collectives, for one op and dtype, as a transport's native collectives."""

    def find(self, collective: str) -> Path | None:
        """The collective, or None if it is not made in two levels with these nodes."""
        levels = self._levels
        # The parts of a node's ranks must lie side by side.
        apart = not (levels.even and levels.in_order and levels.local_size > 1)
        return None if apart else super().find(collective)

    def _cut(self, lengths: Sequence[int]) -> tuple[list[int], list[tuple[slice, Sequence[int]]]]:
        """The lengths of the parts of this local rank on all nodes; the nodes' blocks and parts."""
        count, starts = self._levels.local_size, part_starts(lengths)
        blocks = [
            (slice(starts[first], starts[first + count]), lengths[first : first + count])
            for first in range(0, len(lengths), count)
        ]
        return [parts[self._levels.local] for _, parts in blocks], blocks

    def _run(self, lengths: Sequence[int], whole: Action, pipelined: Action) -> str:
        """As `_run_faster`, of so many elements of each rank."""
        nbytes = sum(lengths) * self._dtype.itemsize
        return self._run_faster(nbytes, nbytes >= LEAST_PART * len(lengths), whole, pipelined)

    def _exchange(self, distance: int, sent: Array, received: Array, actions: list[Action]) -> None:
        """Send to the node `distance` after this one, receive from the one as far before."""
        levels, across = self._levels, self._levels.across
        assert across is not None
        nodes = len(levels.members)
        sends = [((levels.node + distance) % nodes, sent.view(np.uint8).data)]
        receives = [((levels.node - distance) % nodes, received.view(np.uint8).data)]
        beside(partial(across.transport.exchange_beside, sends, receives), actions)

    def _reduce_scatter(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> str:
        """On the node for the ranks of one node after the other, then between nodes."""
        assert source is not None
        given = source
        own, blocks = self._cut(lengths)

        def enter(node: int, folded: Array) -> None:
            block, parts = blocks[node]
            self._in_node("reduce_scatter", given[block], folded, parts)

        def whole() -> None:
            folded = self._levels.work(sum(own), self._dtype)
            for node, part in enumerate(parts_by_rank(folded, own)):
                enter(node, part)
            self._between("reduce_scatter", folded, target, lengths=own)

        pipelined = partial(self._fold_in_turn, enter, target, own)
        way = self._run(lengths, whole, pipelined)
        self._finish(target)
        return way

    def _fold_in_turn(
        self, enter: Callable[[int, Array], None], target: Array, own: Sequence[int]
    ) -> None:
        """`enter` folds this rank's part for a node, of this node's ranks."""
        levels, nodes, reduction = self._levels, len(own), self._reduction
        assert reduction is not None
        # With two nodes one buffer is enough for what arrives.
        lengths = [*own, len(target) if nodes > 2 else 0]
        *folded, spare = parts_by_rank(levels.work(sum(lengths), self._dtype), lengths)
        # The place of this node's own part, which is folded in the target, is free.
        arrived = spare, folded[levels.node]
        after = [(levels.node + distance) % nodes for distance in range(1, nodes)]

        def fold(distance: int) -> None:
            node, part = (levels.node - distance) % nodes, arrived[distance % 2]
            # In the order of the nodes, as a schedule does: the sign of a zero and the rounding of
            # a complex product depend on it.
            first, second = (part, target) if node < levels.node else (target, part)
            reduction.fold(first, second, target)

        enter(after[0], folded[after[0]])
        for distance, node in enumerate(after, 1):
            actions: list[Action] = [
                partial(enter, each, folded[each]) for each in after[distance : distance + 1]
            ]
            if distance == 1:
                actions.append(partial(enter, levels.node, target))
            else:
                actions.append(partial(fold, distance - 1))
            self._exchange(distance, folded[node], arrived[distance % 2], actions)
        fold(nodes - 1)

    def _all_gather(
        self, source: Array | None, target: Array, lengths: Sequence[int], root: int
    ) -> str:
        """Between nodes, then on the node of the ranks of one node after the other."""
        levels = self._levels
        rank = levels.members[levels.node][levels.local]
        given = own_part(target, lengths, rank) if source is None else source
        own, blocks = self._cut(lengths)
        joined = levels.work(sum(own), self._dtype)
        places = parts_by_rank(joined, own)

        def leave(node: int, part: Array) -> None:
            block, parts = blocks[node]
            self._in_node("all_gather", part, target[block], parts)

        def whole() -> None:
            self._between("all_gather", given, joined, lengths=own)
            for node, part in enumerate(places):
                leave(node, part)

        def pipelined() -> None:
            node, part = levels.node, given
            for distance in range(1, len(blocks)):
                origin = (levels.node - distance) % len(blocks)
                self._exchange(distance, given, places[origin], [partial(leave, node, part)])
                node, part = origin, places[origin]
            leave(node, part)

        return self._run(lengths, whole, pipelined)
