"""all_reduce of small arrays between ranks of one node: the meeting carries the data.

Each rank lays its elements down beside its arrival and folds everybody's for itself, so that one
wait is all it takes. What can be known beforehand is looked up once and kept in a closure, since
at this size the time goes into Python's own steps; and arguments that need any care are left to the
general path, by returning `PASS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.agreement import Agreement
from collectives.engine import Engine
from collectives.operations.reductions import ReduceInput
from collectives.recorder import CALLS_KEPT, clock
from collectives.reduction import Array, ReduceOp, finish, plain_ufunc
from collectives.shared.arrival import SEQUENCE_BITS, SEQUENCE_MASK
from collectives.shared.memory import ARRIVALS, SMALL_BYTES
from collectives.signature import fingerprint

PASS = object()
"""What a small all_reduce returns where the general path must do it."""

# All ranks read all elements: with more than this in all, slices are the better way.
_MOST_BYTES = 24 << 10

AllReduce = Callable[[Array, Any], Any]


def small_all_reduce(engine: Engine, op: ReduceOp | str, array: Array) -> AllReduce | None:
    """The function (array, out) → result for arrays of this dtype and shape, if there is one."""
    given = ReduceInput(array, op)
    node, agreement = engine.node, engine.agreement
    if node is None or agreement is None or not node.memory_is_all:
        return None
    ufunc = plain_ufunc(given.op, given.dtype)
    nbytes = array.size * given.dtype.itemsize
    fits = 0 < nbytes <= SMALL_BYTES and nbytes * engine.size <= _MOST_BYTES
    if ufunc is None or not fits or not array.dtype.isnative:
        return None
    return _build(engine, agreement, given, ufunc)


def _build(
    engine: Engine, agreement: Agreement, given: ReduceInput, ufunc: np.ufunc
) -> AllReduce:
    assert engine.node is not None
    memory, rank, size = engine.node.steps.memory, engine.rank, engine.size
    shape, dtype, op, count = given.shape, given.dtype, given.op, given.array.size
    nbytes = count * dtype.itemsize
    slots = [[slot[:nbytes].view(dtype).reshape(shape) for slot in each] for each in memory.slots]
    own_slots, firsts, seconds = slots[rank], slots[0], slots[1]
    rest = slots[2:]
    signature = given.signature("all_reduce")
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    own, others, arrivals = memory.own, memory.others, ARRIVALS
    peer = others[0]
    fence, pair = memory.fence, size == 2
    acquire, release = engine.lock.acquire, engine.lock.release
    run, ring, recorder = engine.quiet.run, engine.recorder.ring, engine.recorder
    last, mean = CALLS_KEPT - 1, op is ReduceOp.MEAN
    ndarray, empty, meet = np.ndarray, np.empty, agreement.meet_at

    def all_reduce(array: Array, out: Any) -> Any:
        if out is None:
            out = empty(shape, dtype)
        elif (
            type(out) is not ndarray
            or not out.flags.writeable
            or (out is not array and out.shape != shape)
            or out.dtype != dtype
        ):
            return PASS
        acquire()
        try:
            if engine.broken is not None:
                return PASS
            start = clock()
            sequence = agreement.sequence + 1
            parity = sequence & 1
            word = base | sequence & SEQUENCE_MASK
            own_slots[parity][...] = array
            if fence is not None:
                fence()
            index = arrivals[parity]
            own[index] = word
            if not pair or fence is not None or peer[index] != word:
                meet(signature, word, sequence)
            agreement.sequence = sequence
            run(ufunc, firsts[parity], seconds[parity], out)
            for slot in rest:
                run(ufunc, out, slot[parity], out)
            if mean:
                run(finish, op, out, size)
            position = recorder.position
            ring[position & last] = (sequence, signature, "shared", start, clock())
            recorder.position = position + 1
            return out
        finally:
            release()

    return all_reduce
