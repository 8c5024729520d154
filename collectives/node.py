"""A rank's part in its node: the memory that it shares, and the way to the other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from collectives.reduction import Array, ReduceOp
from collectives.schedule import split_lengths
from collectives.selection import HIERARCHICAL, SHARED
from collectives.shared.arena import Arena
from collectives.shared.direct import Attempt, Direct
from collectives.shared.packed import Packed
from collectives.shared.staged import Staged
from collectives.shared.steps import Steps
from collectives.transports.base import Native, Transport


class Across(Protocol):
    """The ranks of equal place on all nodes."""

    def __call__(self, array: Array, op: ReduceOp) -> None:
        """All-reduce in place."""

    def close(self) -> None:
        """Give the way back. Collective."""


class Node:
    """The shared memory of one node's ranks, in use."""

    def __init__(
        self,
        transport: Transport,
        segments: list[memoryview],
        steps: Steps,
        arena: Arena,
        *,
        slices: int | None,
        across: Across | None,
    ) -> None:
        """`transport` connects the node's ranks.

        `slices` is how many ranks of each node speak with those of equal place on the others, None
        where there is no other node; `across` is how this one does, if it does.
        """
        self._transport, self._segments = transport, segments
        self.steps, self.arena = steps, arena
        self._slices, self._across = slices, across
        self._packed: dict[tuple[str, np.dtype[Any]], Packed] = {}

    @property
    def memory_is_all(self) -> bool:
        """Whether all ranks are on this node."""
        return self._slices is None

    def paths(
        self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]
    ) -> dict[str, Native]:
        """What the node's memory can do of a collective of all ranks."""
        if self._slices is None:
            return {SHARED: self.shared(collective, op, dtype)}
        if collective == "all_reduce" and op is not None:
            first = self.shared("reduce_scatter", op, dtype)
            last = self.shared("all_gather", op, dtype)
            return {HIERARCHICAL: partial(self._hierarchical, first, last, op, self._slices)}
        return {}

    def attempt(self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]) -> Attempt | None:
        """The collective of all ranks that does nothing, and says so, for ordinary arrays."""
        if self._slices is not None:
            return None
        return Direct(self.steps, self.arena, op, dtype).find(collective)

    def shared(self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]) -> Native:
        """Of this node's ranks alone: where the arrays lie, or else through the stages."""
        staged: Native = getattr(Staged(self.steps, op, dtype), collective)
        attempt = Direct(self.steps, self.arena, op, dtype).find(collective)
        if attempt is None:
            return staged

        def run(source: Array | None, target: Array, lengths: Sequence[int], root: int) -> None:
            if not attempt(source, target, lengths, root):
                staged(source, target, lengths, root)

        return run

    def packed(self, op: ReduceOp, dtype: np.dtype[Any]) -> Packed:
        """Reductions of what is packed into the memory, where all ranks are on this node."""
        key = (op.value, dtype)
        if key not in self._packed:
            self._packed[key] = Packed(self.steps, op, dtype)
        return self._packed[key]

    def _hierarchical(
        self,
        reduce_scatter: Native,
        all_gather: Native,
        op: ReduceOp,
        slices: int,
        source: Array | None,
        target: Array,
        lengths: Sequence[int],
        root: int,
    ) -> None:
        """Reduce-scatter on the node, all-reduce of each slice between nodes, all-gather again."""
        rank, size = self.steps.rank, self.steps.size
        parts = [*split_lengths(len(target), slices).tolist(), *[0] * (size - slices)]
        start = sum(parts[:rank])
        own = target[start : start + parts[rank]]
        if size > 1:
            reduce_scatter(target if source is None else source, own, parts, 0)
        elif source is not None:
            own[:] = source
        if self._across is not None:
            self._across(own, op)
        if size > 1:
            all_gather(None, target, parts, 0)

    def close(self) -> None:
        """Free the memory, but for windows that arrays of the user still lie in. Collective."""
        if self._across is not None:
            self._across.close()
        self.arena.close()
        self._transport.free(self._segments)
        self._transport.close()
