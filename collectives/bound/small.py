"""Bound calls of small arrays between the ranks of a node, in one step.

Each rank stores its elements beside its arrival, and folds or copies those of all ranks by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.calls import PASS
from collectives.consistency.flight_recorder import CALLS_KEPT, clock
from collectives.consistency.signature import Signature, fingerprint
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, Fold, ReduceOp, Reduction, reduction_for
from collectives.schedules.paths import SLOTS
from collectives.shm import migratory
from collectives.shm.addresses import Publish
from collectives.shm.layout import ARRIVALS, DATA, SMALL_BYTES
from collectives.shm.node import Node
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK
from collectives.shm.selector import LEAST_BYTES

Run = Callable[[Any, Any, int | None], Any]
"""The function run(source, target, index) of a bound call, once all ranks have made it."""

# All ranks read all elements of small arrays: with more than this in all, stages are better.
SMALL_BYTES_OF_ALL = 128 << 10


def node_of_all(engine: Engine) -> Node | None:
    """The node, where its memory is that of all ranks, so that data may travel with the check."""
    node = engine.node
    return node if node is not None and engine.call_check and node.memory_is_all else None


def room_beside_arrival(node: Node) -> int:
    """How many bytes one rank of a node may store beside its arrival."""
    # Registered arrays of more bytes are read where they are.
    return LEAST_BYTES - 1 if node.pool.in_use else SMALL_BYTES


def room_of_each(node: Node) -> int:
    """How many bytes each rank of a node may store beside its arrival."""
    return min(room_beside_arrival(node), SMALL_BYTES_OF_ALL // node.steps.memory.size)


def small_reduction(
    engine: Engine, op: ReduceOp, dtype: np.dtype[Any], nbytes: int
) -> Reduction | None:
    """The reduction of arrays that are small enough for a single step; None for others."""
    node = node_of_all(engine)
    if node is None:
        return None
    small = 0 < nbytes <= room_of_each(node)
    reduction = reduction_for(op, dtype)
    return reduction if small and reduction.plain_fold else None


def small_fold(
    engine: Engine, reduction: Reduction, count: int, ranks: Sequence[int], part: slice
) -> tuple[Run, Publish]:
    """What folds a part of the elements of some ranks into the target, for `bound.bind`.

    And what publishes the source, of `count` elements. Nothing is folded where there are no ranks.
    """
    assert engine.node is not None
    assert reduction.plain_fold is not None
    memory, size, nbytes = engine.node.steps.memory, engine.size, count * reduction.dtype.itemsize
    places = {
        at + DATA: [slot[parity][:nbytes].view(reduction.dtype) for slot in memory.slots]
        for parity, at in enumerate(ARRIVALS)
    }
    stores = {index: each[engine.rank] for index, each in places.items()}
    parts = {index: [each[rank][part] for rank in ranks] for index, each in places.items()}
    peer = (engine.rank + 1) % size
    take = migratory.taker(size, {index: each[peer][part] for index, each in places.items()})
    fold, errstate, finish = reduction.plain_fold, engine.errstate.run, reduction.finish

    def publish(index: int, source: Any, target: Any) -> None:
        stores[index][...] = target if source is None else source

    def run(source: Any, target: Array, index: Any) -> None:
        errstate(fold_parts, fold, parts[index], target)
        if take is not None and peer in ranks:
            take(index)
        if reduction.divides:
            errstate(finish, target, size)

    return (run if ranks else nothing), publish


def fold_parts(fold: Fold, parts: Sequence[Array], target: Array) -> None:
    """Fold one part or more, one after the other."""
    if len(parts) == 1:
        target[...] = parts[0]
        return
    first, second, *rest = parts
    fold(first, second, target)
    for each in rest:
        fold(target, each, target)


def nothing(source: Any, target: Any, index: Any) -> None:
    """Move no data."""


def bind_small(
    engine: Engine, signature: Signature, reduction: Reduction, shape: tuple[int, ...]
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → result.

    As `bound.bind`, written out: calls of Python functions would take most of the time.
    """
    assert engine.node is not None
    assert engine.call_check is not None
    assert reduction.plain_fold is not None
    check, pool, in_use = engine.call_check, engine.node.pool, engine.node.pool.in_use
    memory, rank, size = engine.node.steps.memory, engine.rank, engine.size
    dtype, fold = reduction.dtype, reduction.plain_fold
    nbytes = math.prod(shape) * dtype.itemsize
    slots = [[slot[:nbytes].view(dtype).reshape(shape) for slot in each] for each in memory.slots]
    own_slots, firsts, seconds, rest = slots[rank], slots[0], slots[1], slots[2:]
    fold_two = _fold_of_two(fold, slots, rank)
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    own, peer, fence, arrivals = memory.own, memory.others[0], memory.fence, ARRIVALS
    one_word = size == 2 and fence is None
    acquire, release, arrive = engine.lock.acquire, engine.lock.release, check.check_at
    errstate, ring, recorder = engine.errstate.run, engine.recorder.ring, engine.recorder
    last, ndarray, empty = CALLS_KEPT - 1, np.ndarray, np.empty
    divides, finish = reduction.divides, reduction.finish

    def call(array: Array, out: Any) -> Any:
        if out is None:
            out = empty(shape, dtype)
        elif (
            type(out) is not ndarray
            or not out.flags.carray
            or (out is not array and out.shape != shape)
            or out.dtype != dtype
        ):
            return PASS
        inside = made = False
        sequence, start = -1, 0
        if engine.before_call is not None:
            engine.before_call()
        try:
            acquire()
            try:
                inside, sequence = True, check.sequence + 1
                if engine.broken is not None:
                    raise engine.refusal()
                if in_use is not pool.in_use:
                    return PASS
                start = clock()
                parity = sequence & 1
                word = base | sequence & SEQUENCE_MASK
                own_slots[parity][...] = array
                if fence is not None:
                    fence()
                index = arrivals[parity]
                check.sequence = sequence
                own[index] = word
                if not one_word or peer[index] != word:
                    arrive(signature, word, sequence)
                if fold_two is None:
                    errstate(fold, firsts[parity], seconds[parity], out)
                    for slot in rest:
                        errstate(fold, out, slot[parity], out)
                else:
                    errstate(fold_two, array, parity, out)
                if divides:
                    errstate(finish, out.reshape(-1), size)
                position = recorder.position
                ring[position & last] = (sequence, signature, SLOTS, start, clock())
                recorder.position = position + 1
                made = True
                return out
            except BaseException as error:
                engine.fail_bound(error, sequence, signature, start)
                raise
            finally:
                release()
        except BaseException as error:
            engine.unlock(error, inside, made)
            raise

    return call


def _fold_of_two(
    fold: Fold, slots: Sequence[Sequence[Array]], rank: int
) -> Callable[[Array, int, Array], None] | None:
    """The function (array, parity, out) by which a rank of two takes the lines of the other's slot.

    None where that does not pay. The rank reads its array in place of its own slot, except where
    NumPy would copy it first: its loops for copies may keep the other one of two NaNs.
    """
    own_slots, theirs, overlap = slots[rank], slots[1 - rank], np.may_share_memory
    take = migratory.taker(len(slots), dict(enumerate(theirs)))
    if take is None:
        return None

    def fold_two(array: Array, parity: int, out: Array) -> None:
        flags, views = array.flags, array.base is not None or out.base is not None
        plain = array.dtype == out.dtype and flags.c_contiguous and flags.aligned
        apart = out is array or not (views and overlap(array, out))
        own = array if plain and apart else own_slots[parity]
        if rank:
            fold(theirs[parity], own, out)
        else:
            fold(own, theirs[parity], out)
        take(parity)

    return fold_two
