"""Bound all_reduce of small arrays between nodes: the data travel with the check of the call.

The leader of each node folds the arrays of its ranks, and then those of all nodes, in the order of
the nodes, so that every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.calls import PASS
from collectives.calls.bound_small import SMALL_BYTES_OF_ALL
from collectives.consistency.dissemination import LARGEST_EXCHANGE, Block
from collectives.consistency.signature import Signature, fingerprint
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, Reduction, reduction_for
from collectives.schedules.paths import DISSEMINATION
from collectives.shm.layout import SMALL_BYTES
from collectives.shm.node_barrier import SEQUENCE_BITS


def exchanged_reduction(
    engine: Engine, op: ReduceOp, dtype: np.dtype[Any], nbytes: int
) -> Reduction | None:
    """The reduction of arrays so small that they travel with the check; None for others."""
    nodes = 1 if engine.call_check is None else engine.call_check.nodes
    if nodes == 1:
        return None
    small = 0 < nbytes <= min(SMALL_BYTES, LARGEST_EXCHANGE // nodes)
    reduction = reduction_for(op, dtype)
    small = small and nbytes * engine.size <= SMALL_BYTES_OF_ALL
    return reduction if small and reduction.plain_fold else None


class _ReductionExchange:
    """As `dissemination.Exchange`: one array of each rank, all of a shape."""

    def __init__(self, engine: Engine, reduction: Reduction, shape: tuple[int, ...]) -> None:
        assert reduction.plain_fold is not None
        self._fold, self._errstate = reduction.plain_fold, engine.errstate.run
        self._dtype, self._shape = reduction.dtype, shape
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * reduction.dtype.itemsize
        self.source: Any = None
        self.target: Any = None
        self._arrays: dict[tuple[int, int], tuple[Array, Array]] = {}
        """Blocks as arrays, with their buffers, which are the same in most calls."""
        self.slots: list[list[Array]] = []
        """Of this node's ranks, by parity; the leader's comes first, and takes the result."""
        if engine.node is not None and engine.node.steps.size > 1:
            memory = engine.node.steps.memory
            self.slots = [
                [self._array(slots[parity], 0) for slots in memory.slots] for parity in range(2)
            ]
            self._rank = memory.rank

    def _array(self, content: Array, start: int) -> Array:
        return content[start : start + self.nbytes].view(self._dtype).reshape(self._shape)

    def _array_of(self, block: Block) -> Array:
        content, start = block
        known = self._arrays.get((id(content), start))
        if known is None:
            known = self._arrays[id(content), start] = self._array(content, start), content
        return known[0]

    def store(self, parity: int) -> None:
        """Into this rank's slot."""
        if self.slots:
            self.slots[parity][self._rank][...] = self.source

    def pack(self, block: Block, parity: int) -> None:
        """Fold the slots of the node's ranks."""
        if self.slots:
            self._reduce(self.slots[parity], self._array_of(block))
        else:
            self._array_of(block)[...] = self.source

    def unpack(self, blocks: Sequence[Block], parity: int) -> None:
        """Fold into the leader's slot, or straight into the target."""
        out = self.slots[parity][0] if self.slots else self.target
        self._reduce([self._array_of(block) for block in blocks], out)

    def _reduce(self, arrays: Sequence[Array], out: Array) -> None:
        first = arrays[0]
        for each in arrays[1:]:
            self._errstate(self._fold, first, each, out)
            first = out


def bind_exchange(
    engine: Engine, signature: Signature, reduction: Reduction, shape: tuple[int, ...]
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → result; PASS where `out` can't take the result as it comes."""
    exchange, dtype = _ReductionExchange(engine, reduction, shape), reduction.dtype
    base, check = fingerprint(signature.agreed) << SEQUENCE_BITS, engine.call_check
    assert check is not None

    def deliver(array: Array, out: Array) -> None:
        if exchange.slots:
            out[...] = exchange.slots[check.sequence & 1][0]
        if reduction.divides:
            engine.errstate.run(reduction.finish, out.reshape(-1), engine.size)

    def all_reduce(array: Array, out: Any) -> Any:
        if out is None:
            out = np.empty(shape, dtype)
        elif (
            type(out) is not np.ndarray
            or not out.flags.carray
            or out.shape != shape
            or out.dtype != dtype
        ):
            return PASS
        engine.perform_bound(signature, base, DISSEMINATION, deliver, array, out, exchange=exchange)
        return out

    return all_reduce
