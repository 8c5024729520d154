"""The short ways of four collectives, for NumPy arrays that need no care.

What can be known beforehand is looked up once for each (op, dtype, shape) and kept in a closure,
since with small arrays the time goes into Python's own steps. Which way a call goes follows from
that key and from what all ranks did before, never from one rank's arguments: those that need care
are brought into shape by the caller (`PASS`), and then go the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.calls import movements, reductions
from collectives.calls.arguments import split_rows
from collectives.calls.reductions import ReduceInput
from collectives.consistency.call_check import CallCheck
from collectives.consistency.flight_recorder import CALLS_KEPT, clock
from collectives.consistency.signature import fingerprint
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, finish, fold_dtype, plain_fold
from collectives.schedules.paths import NATIVE, SHARED
from collectives.shm.layout import ARRIVALS, SMALL_BYTES
from collectives.shm.node import Path
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK
from collectives.shm.selector import LEAST_BYTES

PASS = object()
"""What a quick all_reduce returns, before it did anything, for arguments that need care."""

# All ranks read all elements of small arrays: with more than this in all, stages are better.
_SMALL_BYTES_OF_ALL = 128 << 10

_BYTES = np.dtype(np.uint8)

AllReduce = Callable[[Array, Any], Any]
Fold = Callable[[Array, Array, Array], Any]


def bind_all_reduce(
    engine: Engine, given: ReduceInput, what: str | None = None
) -> AllReduce | None:
    """The function (array, out) → result for arrays like this one, if there is one."""
    node, call_check = engine.node, engine.call_check
    if node is None or call_check is None or not node.memory_is_all:
        return None
    nbytes = given.array.size * given.dtype.itemsize
    fold = _small_fold(engine, given.op, given.dtype, nbytes)
    if fold is not None:
        return _small(engine, call_check, given, fold, what)
    paths = engine.paths("all_reduce", given.op, given.dtype)
    chosen = engine.choose("all_reduce", nbytes, paths)
    return _large(engine, given, paths[chosen], what) if chosen in paths else None


def takes_one_step(engine: Engine, op: ReduceOp, dtype: np.dtype[Any], nbytes: int) -> bool:
    """Whether an all_reduce of ordinary arrays of so many bytes is done in a single step."""
    return _small_fold(engine, op, dtype, nbytes) is not None


def _small_fold(engine: Engine, op: ReduceOp, dtype: np.dtype[Any], nbytes: int) -> Fold | None:
    """The fold of arrays that are small enough for a single step; None where they take another."""
    node = engine.node
    if node is None or not node.memory_is_all:
        return None
    small = 0 < nbytes <= SMALL_BYTES and nbytes * engine.size <= _SMALL_BYTES_OF_ALL
    registered = node.arena.in_use and nbytes >= LEAST_BYTES
    return plain_fold(op, dtype) if small and not registered else None


def _large(engine: Engine, given: ReduceInput, path: Path, what: str | None) -> AllReduce:
    """Contiguous arrays, by a path that isn't a schedule."""
    shape, dtype, op, size = given.shape, given.dtype, given.op, engine.size
    signature = given.signature("all_reduce", detail=what)
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    mean, ndarray, empty = op is ReduceOp.MEAN, np.ndarray, np.empty
    overlap = np.may_share_memory

    quiet = engine.errstate.run

    def run(source: Array | None, target: Array) -> None:
        engine.path = quiet(path, source, target, (), 0) or NATIVE
        if mean:
            quiet(finish, op, target, size)

    def all_reduce(array: Array, out: Any) -> Any:
        flags = array.flags
        if array.dtype != dtype or not (flags.c_contiguous and flags.aligned):
            return PASS
        source: Array | None = array.reshape(-1)
        if out is None:
            out = empty(shape, dtype)
        elif out is array:
            source = None
        elif (
            type(out) is not ndarray
            or out.shape != shape
            or out.dtype != dtype
            or ((out.base is not None or array.base is not None) and overlap(array, out))
        ):
            return PASS
        if not out.flags.carray:
            return PASS
        engine.perform_quickly(signature, base, run, source, out.reshape(-1))
        return out

    return all_reduce


def _small(
    engine: Engine, call_check: CallCheck, given: ReduceInput, fold: Fold, what: str | None
) -> AllReduce:
    """Each lays its elements down beside its arrival and folds everybody's for itself: one wait."""
    assert engine.node is not None
    memory, rank, size = engine.node.steps.memory, engine.rank, engine.size
    shape, dtype, op, count = given.shape, given.dtype, given.op, given.array.size
    nbytes = count * dtype.itemsize
    slots = [[slot[:nbytes].view(dtype).reshape(shape) for slot in each] for each in memory.slots]
    own_slots, firsts, seconds = slots[rank], slots[0], slots[1]
    rest = slots[2:]
    signature = given.signature("all_reduce", detail=what)
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    own, others, arrivals = memory.own, memory.others, ARRIVALS
    peer = others[0]
    fence, pair = memory.fence, size == 2
    acquire, release = engine.lock.acquire, engine.lock.release
    run, ring, recorder = engine.errstate.run, engine.recorder.ring, engine.recorder
    last, mean = CALLS_KEPT - 1, op is ReduceOp.MEAN
    arena, in_use = engine.node.arena, engine.node.arena.in_use
    ndarray, empty, meet = np.ndarray, np.empty, call_check.check_at

    def all_reduce(array: Array, out: Any) -> Any:
        if out is None:
            out = empty(shape, dtype)
        elif (
            type(out) is not ndarray
            or not out.flags.carray
            or (out is not array and out.shape != shape)
            or out.dtype != dtype
        ):
            return PASS
        # As `CallScope.whole`, with a lock that is taken and given back in half of the time.
        inside = made = False
        sequence = -1
        try:
            acquire()
            try:
                inside, sequence = True, call_check.sequence + 1
                if engine.broken is not None:
                    raise engine.refusal()
                if in_use is not arena.in_use:
                    # Another thread has made the first registered array since this was looked up.
                    return PASS
                start = clock()
                parity = sequence & 1
                word = base | sequence & SEQUENCE_MASK
                own_slots[parity][...] = array
                if fence is not None:
                    fence()
                index = arrivals[parity]
                call_check.sequence = sequence
                own[index] = word
                if not pair or fence is not None or peer[index] != word:
                    meet(signature, word, sequence)
                run(fold, firsts[parity], seconds[parity], out)
                for slot in rest:
                    run(fold, out, slot[parity], out)
                if mean:
                    run(finish, op, out.reshape(-1), size)
                position = recorder.position
                ring[position & last] = (sequence, signature, SHARED, start, clock())
                recorder.position = position + 1
                made = True
                return out
            except BaseException as error:
                if call_check.sequence == sequence:
                    engine.leave(error)
                raise
            finally:
                release()
        except BaseException as error:
            engine.unlock(error, inside, made)
            raise

    return all_reduce


def bind_broadcast(engine: Engine, array: Array, root: int) -> Callable[[Array], Array]:
    """The function of contiguous, writeable arrays like this one: as the general way, sooner."""
    signature = movements.broadcast(array, root, None, on_root=True).signature
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    paths = engine.paths("broadcast", None, _BYTES)
    chosen = engine.choose("broadcast", array.nbytes, paths) if engine.size > 1 else ""
    path, quiet = paths.get(chosen), engine.errstate.run

    def run(source: Array | None, target: Array) -> None:
        if path is None:
            engine.run("broadcast", None, target, root=root)
        else:
            engine.path = quiet(path, None, target.view(_BYTES), (), root) or NATIVE

    def broadcast(array: Array) -> Array:
        engine.perform_quickly(signature, base, run, None, array.reshape(-1))
        return array

    return broadcast


def bind_all_gather(engine: Engine, array: Array, out: Array) -> Callable[[Array, Array], Any]:
    """The function (array, out) for arrays like these along axis 0: as the general way, sooner."""
    signature = movements.all_gather(array, 0, out, None).signature
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    count, room, row_bytes = len(array), len(out), math.prod(array.shape[1:]) * array.itemsize
    paths = engine.paths("all_gather", None, _BYTES)
    chosen = engine.choose("all_gather", out.nbytes, paths) if engine.size > 1 else ""
    path, quiet = paths.get(chosen), engine.errstate.run

    def run(source: Array, target: Array) -> None:
        counts = movements.counts_of_all(engine, count, room)
        lengths = [each * row_bytes for each in counts]
        given, filled = source.view(_BYTES), target.view(_BYTES)
        if path is None:
            engine.run("all_gather", given, filled, lengths=lengths)
        else:
            engine.path = quiet(path, given, filled, lengths, 0) or NATIVE

    def all_gather(array: Array, out: Array) -> Any:
        if not _plain(array, out):
            return PASS
        engine.perform_quickly(signature, base, run, array.reshape(-1), out.reshape(-1))
        return out

    return all_gather


def bind_reduce_scatter(
    engine: Engine, array: Array, op: ReduceOp, out: Array
) -> Callable[[Array, Array], Any]:
    """The function (array, out) for arrays like these along axis 0: as the general way, sooner."""
    size, dtype = engine.size, array.dtype
    operation = reductions.reduce_scatter(array, op, 0, out, None, rank=engine.rank, size=size)
    base = fingerprint(operation.signature.agreed) << SEQUENCE_BITS
    row = math.prod(array.shape[1:])
    lengths = [count * row for count in split_rows(len(array), size)]
    converted = fold_dtype(op, dtype) != dtype or not dtype.isnative
    quiet, mean = engine.errstate.run, op is ReduceOp.MEAN

    def run(source: Array, target: Array) -> None:
        engine.run("reduce_scatter", source, target, lengths=lengths, op=op)
        if mean:
            quiet(finish, op, target, size)

    def reduce_scatter(array: Array, out: Array) -> Any:
        if converted or not _plain(array, out):
            return PASS
        engine.perform_quickly(operation.signature, base, run, array.reshape(-1), out.reshape(-1))
        return out

    return reduce_scatter


def _plain(array: Array, out: Array) -> bool:
    """Whether neither needs care: contiguous, aligned, `out` writeable, and both apart."""
    if not (out.flags.carray and array.flags.c_contiguous and array.flags.aligned):
        return False
    apart = out.base is None and array.base is None and out is not array
    return apart or not np.may_share_memory(array, out)
