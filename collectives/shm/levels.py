"""The place of one rank in two levels: its node, and the ranks of equal local rank on all nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from collectives.reductions.reduction import Array, ReduceOp
from collectives.transports.base import Actions, PointToPoint

Work = Callable[[int, np.dtype[Any]], Array]
"""A flat buffer for intermediate results."""


class Across(Protocol):
    """The ranks of equal local rank on all nodes."""

    @property
    def transport(self) -> PointToPoint:
        """Their connections; the ranks are the numbers of the nodes."""

    def run(
        self,
        collective: str,
        source: Array | None,
        target: Array,
        *,
        lengths: Sequence[int] | None = None,
        op: ReduceOp | None = None,
        root: int = 0,
        algorithm: str | None = None,
        overlapped: Actions | None = None,
    ) -> object:
        """As `Engine.run`."""

    def use(self, costs: Any, name: str) -> None:
        """As `Engine.use`."""

    def close(self) -> None:
        """Release the transport. Collective."""


class Levels:
    """The place of one rank in both levels."""

    def __init__(
        self,
        members: Sequence[Sequence[int]],
        rank: int,
        across: Across | None,
        work: Work,
        exchange: Callable[[int], list[list[int]]],
    ) -> None:
        """`members` holds the ranks of each node; `across` is None on ranks that have no slice.

        A node has as many slices as the smallest one has ranks. `exchange` returns the numbers of
        all ranks of the node.
        """
        self.members, self.across, self.work = members, across, work
        self._exchange = exchange
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

    def longest(self, nanoseconds: int) -> int:
        """The longest of all ranks' times."""
        longest = max(map(max, self._exchange(nanoseconds)))
        if self.across is not None:
            word = np.array([longest])
            # A schedule, since from a native collective no error can be raised.
            self.across.run("all_reduce", None, word, op=ReduceOp.MAX, algorithm="doubling")
            longest = int(word[0])
        # Again, for ranks that have no slice.
        return max(map(max, self._exchange(longest)))
