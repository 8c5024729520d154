"""All-reduce of what the ranks of a node pack into their stages.

The packed elements are folded where they lie and stored into everybody's stage, from where each
unpacks them: nothing is copied between the packing and the unpacking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.reduction import Array, ReduceOp, finish, fold_function
from collectives.shared.memory import STAGE_BYTES
from collectives.shared.staged import bounds, others
from collectives.shared.steps import Steps


class Packed:
    """One rank's reductions of packed elements, of one op and dtype, up to `capacity` at a time."""

    def __init__(self, steps: Steps, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self._steps, self._op = steps, op
        self._rank, self._size = steps.rank, steps.size
        self._fold: Callable[[Array, Array, Array], Any] = fold_function(op, dtype)
        self.capacity = STAGE_BYTES // dtype.itemsize
        nbytes = self.capacity * dtype.itemsize
        self._stages = [
            [stage[:nbytes].view(dtype) for stage in stages] for stages in steps.memory.stages
        ]

    def places(self, length: int) -> list[Place]:
        """Where `length` elements may be packed and reduced: of each parity one place."""
        edges = bounds(length, self._size, self._stages[0][0].itemsize)
        own = slice(edges[self._rank], edges[self._rank + 1])
        order = [self._rank, *others(self._rank, self._size)]
        return [
            Place(
                self._stages[self._rank][parity][:length],
                [self._stages[peer][parity][own] for peer in order],
            )
            for parity in (0, 1)
        ]

    def begin(self) -> int:
        """The parity of the place that this rank may pack into now."""
        return self._steps.begin()

    def reduce(self, place: Place) -> None:
        """Return when the reduction lies where this rank has packed, until the next `begin`."""
        steps, fold, slices = self._steps, self._fold, place.slices
        steps.written()
        steps.stages()
        folded = slices[0]
        for theirs in slices[1:]:
            fold(folded, theirs, folded)
        finish(self._op, folded, self._size)
        for theirs in slices[1:]:
            theirs[...] = folded
        steps.read()
        steps.together()


class Place:
    """Part of a stage: what one rank packs into, and its slice of everybody's, its own first."""

    def __init__(self, packed: Array, slices: list[Array]) -> None:
        self.packed, self.slices = packed, slices
