"""Reductions between nodes whose data travel with the check of the call.

The leader of each node folds the arrays of its ranks, and then those of all nodes, in the order of
the nodes, so that every rank has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.bound.small import SMALL_BYTES_OF_ALL, fold_parts
from collectives.consistency.dissemination import LARGEST_EXCHANGE, Block
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, Reduction, reduction_for
from collectives.shm.layout import SMALL_BYTES, STAGE_BYTES, NodeMemory

LARGEST_ALONE = 256 << 10
"""Of two ranks alone on their nodes: halves of more bytes travel without a copy into a message."""
STAGED_BYTES_OF_ALL = 8 * STAGE_BYTES
"""What a leader folds of all ranks of its node, which wait meanwhile."""

WHOLE = slice(None)
# Every rank gets the reduction of everything, of which it needs a part.
_SCATTERED_BYTES = 8 << 10


def exchanged_reduction(
    engine: Engine, collective: str, op: ReduceOp, dtype: np.dtype[Any], nbytes: int
) -> Reduction | None:
    """The reduction of arrays so small that they travel with the check; None for others."""
    nodes = _nodes(engine)
    if nodes == 1:
        return None
    fullest = max(engine.layout.local_sizes)
    most = min(SMALL_BYTES, SMALL_BYTES_OF_ALL // fullest, LARGEST_EXCHANGE // nodes)
    if collective == "reduce_scatter":
        most = min(most, _SCATTERED_BYTES)
    elif collective == "all_reduce" and engine.size == 2:
        # Ranks alone on their nodes need no slots.
        most = LARGEST_ALONE
    if not 0 < nbytes <= most:
        return None
    return _reduction(engine, collective, op, dtype, nbytes)


def staged_reduction(
    engine: Engine, op: ReduceOp, dtype: np.dtype[Any], nbytes: int
) -> Reduction | None:
    """The same of larger arrays, by `all_reduce` between two nodes whose ranks share cores.

    Each of the waits of a collective in two levels costs more there than folds by one rank of a
    node alone.
    """
    layout = engine.layout
    if _nodes(engine) != 2 or layout.size == 2 or layout.oversubscription == 1:
        return None
    if not 0 < nbytes <= min(STAGE_BYTES, STAGED_BYTES_OF_ALL // max(layout.local_sizes)):
        return None
    folds = max(layout.local_sizes) + 1
    return _reduction(engine, "all_reduce", op, dtype, nbytes, folds)


def _nodes(engine: Engine) -> int:
    """How many nodes compare calls: each rank counts as one where none share memory."""
    return 1 if engine.call_check is None else engine.call_check.nodes


def _reduction(
    engine: Engine, collective: str, op: ReduceOp, dtype: np.dtype[Any], nbytes: int, folds: int = 0
) -> Reduction | None:
    """The reduction, if its fold is one of NumPy's functions, and to send with the check pays.

    `folds`: of that many bytes, by the leader while all others wait, if that counts.
    """
    reduction = reduction_for(op, dtype)
    pays = reduction.plain_fold is not None and _pays(engine, collective, op, dtype, nbytes, folds)
    return reduction if pays else None


def _pays(
    engine: Engine, collective: str, op: ReduceOp, dtype: np.dtype[Any], nbytes: int, folds: int
) -> bool:
    """Whether the bytes of all nodes take no longer than a reduction after the check.

    Every node receives those of all others, but needs no round besides those of the check.
    """
    layout, costs = engine.layout, engine.costs
    sent = (len(layout.local_sizes) - 1) * nbytes
    # The bandwidth is that of one of a node's ranks while all of them send.
    seconds = sent / (costs.schedule_bandwidth * min(layout.local_sizes))
    folded = folds * nbytes / costs.reduction
    # Most calls are so small that they need no price, which takes time.
    if seconds + folded <= costs.schedule_latency:
        return True
    choice = engine.price(collective, nbytes, engine.paths(collective, op, dtype))
    seconds = layout.oversubscription * seconds + folded
    return seconds <= min(choice.seconds.values(), default=math.inf)


class Arrays(dict[Block, Array]):
    """Blocks as arrays of one length and shape. The same blocks return in most calls."""

    def __init__(self, nbytes: int, dtype: np.dtype[Any], shape: tuple[int, ...] = (-1,)) -> None:
        super().__init__()
        self._nbytes, self._dtype, self._shape = nbytes, dtype, shape

    def __missing__(self, block: Block) -> Array:
        found = self[block] = self.view(block[0].content, block[1])
        return found

    def view(self, content: Array, start: int) -> Array:
        """The bytes from `start` on."""
        elements: Array = content[start : start + self._nbytes].view(self._dtype)
        return elements.reshape(self._shape)


class ReductionExchange:
    """As `dissemination.Exchange`: as many elements of each rank, in the dtype of the fold."""

    def __init__(
        self, engine: Engine, reduction: Reduction, count: int, part: slice = WHOLE
    ) -> None:
        """`part` is what this rank gets of the result."""
        assert engine.call_check is not None
        assert reduction.plain_fold is not None
        self._fold, self._errstate = reduction.plain_fold, engine.errstate.run
        self._reduction, self._size = reduction, engine.size
        self._dtype, self._part = reduction.dtype, part
        self._nbytes = count * reduction.dtype.itemsize
        self.source: Any = None
        self.target: Any = None
        self._arrays = Arrays(self._nbytes, self._dtype)
        self.slots: list[list[Array]] = []
        """Of this node's ranks, by parity; the leader's comes first, and takes the result."""
        self.parity = 0
        """Of what was stored last."""
        self._folded: Array | None = None
        """The result of a rank alone on its node, unless it lies in the target."""
        if engine.node is not None and engine.node.steps.size > 1:
            self._steps, memory = engine.node.steps, engine.node.steps.memory
            self.slots = [
                [self._arrays.view(places[parity], 0) for places in self._places(memory)]
                for parity in range(2)
            ]
            self.rank = memory.rank

    def _places(self, memory: NodeMemory) -> list[list[Array]]:
        """Where the data of the node's ranks lie, by rank and parity."""
        return memory.slots

    def store(self, parity: int) -> None:
        """Into this rank's slot."""
        self.parity = parity
        if self.slots:
            self.slots[parity][self.rank][...] = self.given

    @property
    def given(self) -> Array:
        """This rank's array."""
        array: Array = self.target if self.source is None else self.source
        return array

    def pack(self, block: Block) -> int:
        """Fold the slots of the node's ranks."""
        if self.slots:
            self._reduce(self.slots[self.parity], self._arrays[block])
        else:
            self._arrays[block][...] = self.given
        return self._nbytes

    def unpack(self, blocks: Sequence[Block]) -> None:
        """Fold into the leader's slot; without slots straight into the target, if it takes all."""
        if self.slots:
            out = self.slots[self.parity][0]
        elif self._part is WHOLE and self.target is not None:
            self._folded, out = None, self.target
        else:
            self._folded = out = np.empty(self._nbytes // self._dtype.itemsize, self._dtype)
        self._reduce(list(map(self._arrays.__getitem__, blocks)), out)

    def _reduce(self, arrays: Sequence[Array], out: Array) -> None:
        self._errstate(fold_parts, self._fold, arrays, out)

    def deliver(self, source: Any, target: Array | None, index: int | None) -> None:
        """Store this rank's part into the target, unless it gets none: for `bound.bind`."""
        folded = self.slots[self.parity][0] if self.slots else self._folded
        self._folded = None
        if target is None:
            return
        if folded is not None:
            target[...] = folded[self._part]
        if self._reduction.divides:
            self._errstate(self._reduction.finish, target, self._size)


class StagedExchange(ReductionExchange):
    """The same of more bytes than a slot holds: through the stages, between two of their steps.

    The check of the call orders the writes and reads of one call, and those of the next. Others may
    still read, in an earlier call, from the stage into which this rank stores before the check.
    """

    def _places(self, memory: NodeMemory) -> list[list[Array]]:
        return memory.stages

    def store(self, parity: int) -> None:
        """Into this rank's stage, once all ranks have read what it held before.

        The leader's is for the result alone.
        """
        if self.slots:
            self.parity = self._steps.await_free_stage(" in an earlier call")
            if self.rank:
                self.slots[self.parity][self.rank][...] = self.given

    def pack(self, block: Block) -> int:
        """Fold the leader's array and the stages of the node's other ranks."""
        if not self.slots:
            return super().pack(block)
        self._reduce([self.given, *self.slots[self.parity][1:]], self._arrays[block])
        return self._nbytes
