"""The shared memory of one node's ranks, and the data paths through it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from collectives.caching import LRU
from collectives.reductions.reduction import ReduceOp, reduction_for
from collectives.schedules.paths import (
    HIERARCHICAL,
    MIGRATORY,
    NATIVE,
    QUICKEST,
    SHARED,
    SINGLE_COPY,
    STAGED,
)
from collectives.schedules.spec import spec_of
from collectives.shm.addresses import AddressExchange, DataPath
from collectives.shm.copy_in_copy_out import CopyInCopyOut
from collectives.shm.cross_memory_attach import CrossMemoryAttach
from collectives.shm.levels import Levels
from collectives.shm.node_blocks import NodeBlocks
from collectives.shm.node_slices import NodeSlices
from collectives.shm.packed import Packed
from collectives.shm.peer_memory import open_peer_memory
from collectives.shm.pool import Gather, Pool
from collectives.shm.progress import ProgressCounters
from collectives.shm.selector import LEAST_BYTES, PathSelector, without_addresses
from collectives.shm.two_levels import Path
from collectives.shm.zero_copy import ZeroCopy
from collectives.transports.base import Native, Transport

_IN_TWO_LEVELS: dict[str, type[NodeSlices | NodeBlocks]] = {
    **dict.fromkeys(("all_reduce", "reduce", "broadcast"), NodeSlices),
    **dict.fromkeys(("reduce_scatter", "all_gather"), NodeBlocks),
}


class Node:
    """The shared memory of one node's ranks, in use."""

    def __init__(
        self,
        transport: Transport,
        segments: list[memoryview],
        steps: ProgressCounters,
        gather: Gather,
        *,
        levels: Levels | None,
        oversubscribed: bool,
    ) -> None:
        """`transport` connects the node's ranks, `gather` exchanges lists of numbers between them.

        `levels` is None where there is one node.
        """
        self._transport, self._segments, self.steps = transport, segments, steps
        self.pool, self.common = Pool(transport, gather), Pool(transport, gather, common=True)
        self._levels = levels
        self.across = None if levels is None else levels.across
        """The ranks of equal local rank on all nodes, or None."""
        self._peers = open_peer_memory(steps)
        self.addresses = AddressExchange(steps, self.pool, oversubscribed=oversubscribed)
        self._packed: LRU[tuple[str, np.dtype[Any]], Packed] = LRU()

    @property
    def memory_is_all(self) -> bool:
        """Whether all ranks are on this node."""
        return self._levels is None

    def paths(
        self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any], native: Native | None
    ) -> dict[str, Path]:
        """The paths of a collective of all ranks that go through the node's memory, by name.

        `native` is the transport's own collective, which may be the quickest.
        """
        if not hasattr(CopyInCopyOut, collective):
            return {}
        if self._levels is None:
            paths = self._data_paths(collective, op, dtype)
            alone = {
                name: PathSelector(self.addresses, None, {name: path}, least_bytes=0, forced=True)
                for name, path in paths.items()
            }
            zero_copy = getattr(ZeroCopy(self.steps, self.pool, op, dtype), collective, None)
            # The ranks of an all_to_all may hold different amounts.
            least = 0 if collective == "all_to_all" else LEAST_BYTES
            shared = PathSelector(self.addresses, zero_copy, paths, least)
            # MPI folds in another order: the bits must not depend on which path was quicker.
            if native is not None and (op is None or self.steps.size == 2):
                paths[NATIVE] = without_addresses(native)
            folds = op is not None
            quickest = PathSelector(self.addresses, zero_copy, paths, least, folds=folds)
            return {**alone, SHARED: shared, QUICKEST: quickest}
        folds_as = None if op is None else reduction_for(op, dtype).folds_as
        in_node = cache(
            lambda name: self.shared(name, folds_as if spec_of(name).reduces else None, dtype)
        )
        made = _IN_TWO_LEVELS.get(collective)
        path = None if made is None else made(self._levels, in_node, op, dtype).find(collective)
        return {} if path is None else {HIERARCHICAL: path}

    def shared(self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]) -> PathSelector:
        """The selector of a collective of this node's ranks alone."""
        zero_copy = getattr(ZeroCopy(self.steps, self.pool, op, dtype), collective, None)
        paths = self._data_paths(collective, op, dtype)
        return PathSelector(self.addresses, zero_copy, paths, LEAST_BYTES)

    def _data_paths(
        self, collective: str, op: ReduceOp | None, dtype: np.dtype[Any]
    ) -> dict[str, DataPath]:
        """Those of ordinary arrays."""
        copied: Native = getattr(CopyInCopyOut(self.steps, op, dtype), collective)
        paths = {STAGED: without_addresses(copied)}
        if self.steps.size == 2:
            owned = CopyInCopyOut(self.steps, op, dtype, migratory=True)
            paths[MIGRATORY] = without_addresses(getattr(owned, collective))
        if self._peers is not None:
            attached = CrossMemoryAttach(self.steps, self._peers, op, dtype)
            if hasattr(attached, collective):
                paths[SINGLE_COPY] = getattr(attached, collective)
        return paths

    def packed(self, op: ReduceOp, dtype: np.dtype[Any]) -> Packed:
        """Reductions of what is packed into the memory, where all ranks are on this node."""
        key = (op.value, dtype)
        return self._packed.get(key) or self._packed.put(key, Packed(self.steps, op, dtype))

    def close(self) -> None:
        """Free the memory, except windows with arrays that are still referenced. Collective."""
        if self.across is not None:
            self.across.close()
        self.pool.close()
        self.common.close()
        self._transport.free(self._segments)
        self._transport.close()
