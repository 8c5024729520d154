"""A rank's part in its node: the memory that it shares, and the way to the other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from collectives.reductions.reduction import Array, ReduceOp
from collectives.schedules.paths import HIERARCHICAL, NATIVE, QUICKEST, SHARED, SINGLE_COPY, STAGED
from collectives.schedules.schedule import split_lengths
from collectives.shm.addresses import AddressExchange, Way
from collectives.shm.copy_in_copy_out import CopyInCopyOut
from collectives.shm.cross_memory_attach import CrossMemoryAttach
from collectives.shm.packed import Packed
from collectives.shm.peer_memory import open_peer_memory
from collectives.shm.pool import Pool
from collectives.shm.progress import ProgressCounters
from collectives.shm.selector import LEAST_BYTES, PathSelector
from collectives.shm.zero_copy import Attempt, ZeroCopy
from collectives.transports.base import Native, Transport

Path = Callable[[Array | None, Array, Sequence[int], int], str | None]
"""As a native collective; may return the name of the way that it went."""


class Across(Protocol):
    """The ranks of equal place on all nodes."""

    def __call__(self, array: Array, op: ReduceOp) -> None:
        """All-reduce in place."""

    def close(self) -> None:
        """Give the way back. Collective."""


def _without_places(native: Native) -> Way:
    return lambda places, *arguments: native(*arguments)


class Node:
    """The shared memory of one node's ranks, in use."""

    def __init__(
        self,
        transport: Transport,
        segments: list[memoryview],
        steps: ProgressCounters,
        arena: Pool,
        common: Pool,
        *,
        slices: int | None,
        across: Across | None,
        oversubscribed: bool,
    ) -> None:
        """`transport` connects the node's ranks.

        `arena` has a block for each rank, `common` one block for all of them.
        `slices` is how many ranks of each node speak with those of equal place on the others, None
        where there is no other node; `across` is how this one does, if it does.
        """
        self._transport, self._segments = transport, segments
        self.steps, self.arena, self.common = steps, arena, common
        self._slices, self._across = slices, across
        self._peers = open_peer_memory(steps)
        self.places = AddressExchange(steps, arena, oversubscribed=oversubscribed)
        self._packed: dict[tuple[str, np.dtype[Any]], Packed] = {}

    @property
    def memory_is_all(self) -> bool:
        """Whether all ranks are on this node."""
        return self._slices is None

    def paths(
        self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any], native: Native | None
    ) -> dict[str, Path]:
        """What the node's memory can do of a collective of all ranks.

        `native` is the transport's own, which the quickest way may be.
        """
        if self._slices is None:
            ways, attempt = self._ways(collective, op, dtype), self._attempt(collective, op, dtype)
            alone = {
                name: PathSelector(self.places, None, {name: way}, least_bytes=0, forced=True)
                for name, way in ways.items()
            }
            shared = {SHARED: self._route(collective, attempt, ways)}
            # It folds in another order, and the bits must not depend on which way was quicker.
            if native is not None and (op is None or self.steps.size == 2):
                ways[NATIVE] = _without_places(native)
            return {**alone, **shared, QUICKEST: self._route(collective, attempt, ways)}
        if collective == "all_reduce" and op is not None:
            first = self.shared("reduce_scatter", op, dtype)
            last = self.shared("all_gather", op, dtype)
            return {HIERARCHICAL: partial(self._hierarchical, first, last, op, self._slices)}
        return {}

    def shared(self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]) -> PathSelector:
        """Of this node's ranks alone."""
        attempt = self._attempt(collective, op, dtype)
        return self._route(collective, attempt, self._ways(collective, op, dtype))

    def _attempt(
        self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]
    ) -> Attempt | None:
        """That of registered arrays."""
        return ZeroCopy(self.steps, self.arena, op, dtype).find(collective)

    def _route(
        self, collective: str, attempt: Attempt | None, ways: dict[str, Way]
    ) -> PathSelector:
        # The ranks of an all_to_all may hold different amounts.
        least = 0 if collective == "all_to_all" else LEAST_BYTES
        return PathSelector(self.places, attempt, ways, least_bytes=least)

    def _ways(self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]) -> dict[str, Way]:
        """Those of ordinary arrays."""
        staged: Native = getattr(CopyInCopyOut(self.steps, op, dtype), collective)
        ways = {STAGED: _without_places(staged)}
        if self._peers is not None:
            copied = CrossMemoryAttach(self.steps, self._peers, op, dtype).find(collective)
            if copied is not None:
                ways[SINGLE_COPY] = copied
        return ways

    def packed(self, op: ReduceOp, dtype: np.dtype[Any]) -> Packed:
        """Reductions of what is packed into the memory, where all ranks are on this node."""
        key = (op.value, dtype)
        if key not in self._packed:
            self._packed[key] = Packed(self.steps, op, dtype)
        return self._packed[key]

    def _hierarchical(
        self,
        reduce_scatter: PathSelector,
        all_gather: PathSelector,
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
        self.common.close()
        self._transport.free(self._segments)
        self._transport.close()
