"""What collectives in two levels share: in the memory of each node, and between nodes.

The ranks of equal local rank on all nodes exchange the messages, so that every byte crosses the
link between two nodes as often as if each node were one rank.

Large arrays are pipelined: while messages are in transit, the ranks of a node work on other parts,
in the same order. A rank that waits for messages goes on with that work, so that no rank waits for
a message of a rank that waits for it in the node's memory. That costs more waits: where cores are
short, or the link is as fast as the memory, whole arrays are faster. Both are tried, where they
give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from collectives.reductions.reduction import Action, Array, ReduceOp, reduction_for
from collectives.schedules.paths import HIERARCHICAL, PIPELINED
from collectives.shm.levels import Levels
from collectives.shm.online_tuning import PathTimes
from collectives.transports.base import Actions

Path = Callable[[Array | None, Array, Sequence[int], int], str | None]
"""As a native collective; may return the name of the data path that it took."""


class TwoLevels:
    """One rank's collectives, for one op and dtype."""

    def __init__(
        self,
        levels: Levels,
        in_node: Callable[[str], Path],
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
        """Of the arrays of about as many bytes."""

    def find(self, collective: str) -> Path | None:
        """The collective, or None if it is not made in two levels with these nodes."""
        found: Path = getattr(self, f"_{collective}")
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

    def _run_faster(self, nbytes: int, large: bool, whole: Action, pipelined: Action) -> str:
        """Run arrays of so many bytes whole or, if they are large, pipelined; which.

        What was faster lately, or always pipelined where the order of the fold matters.
        """
        ways = {PIPELINED: pipelined, HIERARCHICAL: whole}

        def run(path: str) -> str:
            ways[path]()
            return path

        if not large:
            return run(HIERARCHICAL)
        if not self._any_order:
            return run(PIPELINED)
        size = nbytes.bit_length()
        times = self._times.setdefault(size, PathTimes((PIPELINED, HIERARCHICAL)))
        return times.run(run, self._levels.longest)


def beside(begin: Callable[[Actions], None], actions: Iterable[Action]) -> None:
    """Exchange messages and run all actions, some of them while the messages are in transit."""
    overlapped = iter(actions)
    begin(overlapped)
    for action in overlapped:
        action()
