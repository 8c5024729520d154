"""Bound calls: what a kind of call needs is looked up once and kept in a function.

As MPI-4's persistent collectives (MPI 4.1, section 6.13), without their second copy of the buffers:
the function takes new buffers at every call. All ranks of one node bind the same calls, since the
data path follows from what the ranks agree on, never from one rank's arguments: arrays that are
not contiguous, or of another library, are made contiguous first, and go the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.calls.counts import check_room
from collectives.calls.objects import numbers_of_all
from collectives.consistency.flight_recorder import CALLS_KEPT, clock
from collectives.consistency.signature import Signature, fingerprint
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, finish, plain_fold
from collectives.schedules.paths import SHARED
from collectives.shm.layout import ARRIVALS, SMALL_BYTES
from collectives.shm.node import Path
from collectives.shm.node_barrier import SEQUENCE_BITS, SEQUENCE_MASK
from collectives.shm.selector import LEAST_BYTES, PathSelector

PASS = object()
"""What a bound call returns, before it did anything, for arguments that it can't take."""

# All ranks read all elements of small arrays: with more than this in all, stages are better.
_SMALL_BYTES_OF_ALL = 128 << 10
# Words between that of the arrival and the rank's data (`shm.layout`).
_DATA = 2
_BYTES = np.dtype(np.uint8)

Fold = Callable[[Array, Array, Array], Any]
Publish = Callable[[int, Any, Any], None]
Run = Callable[[Any, Any, int | None], Any]


def bind(
    engine: Engine,
    signature: Signature,
    run: Run,
    publish: Publish | None = None,
    path: str = SHARED,
) -> Callable[[Any, Any], Any]:
    """A function (source, target) that makes the call, and returns what `run` returns.

    publish(index, source, target) stores what other ranks read, at that word of this rank's
    segment, before they can see the call. run(source, target, index) is called once all ranks have
    made it; index is None where the ranks don't all share memory, and nothing was published. PASS
    where a first registered array has been made since.
    """
    node, check = engine.node, engine.call_check
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    if node is None or check is None or not node.memory_is_all:

        def perform(source: Any, target: Any) -> Any:
            return engine.perform_bound(signature, base, path, run, source, target, None)

        return perform

    memory, pool, in_use = node.steps.memory, node.pool, node.pool.in_use
    own, peer, fence, arrivals = memory.own, memory.others[0], memory.fence, ARRIVALS
    # Two ranks on a machine that orders stores see by one word that both have arrived.
    sees_by_one_word = engine.size == 2 and fence is None
    acquire, release, arrive = engine.lock.acquire, engine.lock.release, check.check_at
    ring, recorder, last = engine.recorder.ring, engine.recorder, CALLS_KEPT - 1

    def call(source: Any, target: Any) -> Any:
        # As `CallScope.whole`, with a lock that is taken and given back in half of the time.
        inside = made = False
        sequence, start = -1, 0
        try:
            acquire()
            try:
                inside, sequence = True, check.sequence + 1
                if engine.broken is not None:
                    raise engine.refusal()
                if in_use is not pool.in_use:
                    return PASS
                start = clock()
                index = arrivals[sequence & 1]
                word = base | sequence & SEQUENCE_MASK
                if publish is not None:
                    publish(index + _DATA, source, target)
                if fence is not None:
                    fence()
                check.sequence = sequence
                own[index] = word
                if not sees_by_one_word or peer[index] != word:
                    arrive(signature, word, sequence)
                engine.path = path
                result = run(source, target, index + _DATA)
                position = recorder.position
                ring[position & last] = (sequence, signature, engine.path, start, clock())
                recorder.position = position + 1
                made = True
                return result
            except BaseException as error:
                if check.sequence == sequence:
                    recorder.add((sequence, signature, engine.path, start, clock()))
                    engine.leave(error)
                raise
            finally:
                release()
        except BaseException as error:
            engine.unlock(error, inside, made)
            raise

    return call


# all_reduce


def small_fold(engine: Engine, op: ReduceOp, dtype: np.dtype[Any], nbytes: int) -> Fold | None:
    """The fold of arrays that are small enough for a single step; None for others."""
    node = engine.node
    if node is None or engine.call_check is None or not node.memory_is_all:
        return None
    small = 0 < nbytes <= SMALL_BYTES and nbytes * engine.size <= _SMALL_BYTES_OF_ALL
    registered = node.pool.in_use and nbytes >= LEAST_BYTES
    return plain_fold(op, dtype) if small and not registered else None


def bind_all_reduce(
    engine: Engine, signature: Signature, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → result; `dtype` is that of the fold.

    `array` is any NumPy array of the shape whose elements are converted to the dtype. PASS where
    `out` can't take the result as it comes.
    """
    count = int(np.prod(shape, dtype=np.int64))
    fold = small_fold(engine, op, dtype, count * dtype.itemsize)
    if fold is not None:
        return _bind_small(engine, signature, op, dtype, shape, fold)
    ndarray, empty, overlap = np.ndarray, np.empty, np.may_share_memory
    call = _bind_large(engine, signature, op, dtype, count)

    def all_reduce(array: Array, out: Any) -> Any:
        flags = array.flags
        source: Array | None
        if array.dtype == dtype and flags.c_contiguous and flags.aligned:
            source = array.reshape(-1)
        else:
            source = array.astype(dtype, order="C").reshape(-1)
        if out is None:
            out = empty(shape, dtype)
        elif type(out) is not ndarray or not out.flags.carray:
            return PASS
        elif out is array:
            source = None
        elif (
            out.shape != shape
            or out.dtype != dtype
            or ((out.base is not None or array.base is not None) and overlap(array, out))
        ):
            return PASS
        return PASS if call(source, out.reshape(-1)) is PASS else out

    return all_reduce


def _bind_large(
    engine: Engine, signature: Signature, op: ReduceOp, dtype: np.dtype[Any], count: int
) -> Callable[[Array | None, Array], Any]:
    size, mean, errstate = engine.size, op is ReduceOp.MEAN, engine.errstate.run
    move, publish = _component(engine, "all_reduce", op, dtype, count * dtype.itemsize)

    def run(source: Array | None, target: Array, index: int | None) -> None:
        move(source, target, (), 0, index)
        if mean:
            errstate(finish, op, target, size)

    return bind(engine, signature, run, publish)


def _bind_small(
    engine: Engine,
    signature: Signature,
    op: ReduceOp,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    fold: Fold,
) -> Callable[[Array, Any], Any]:
    """Each rank stores its elements beside its arrival and folds those of all: one wait.

    As `bind`, written out, since calls of Python functions would take most of the time.
    """
    assert engine.node is not None
    assert engine.call_check is not None
    check, pool, in_use = engine.call_check, engine.node.pool, engine.node.pool.in_use
    memory, rank, size = engine.node.steps.memory, engine.rank, engine.size
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    slots = [[slot[:nbytes].view(dtype).reshape(shape) for slot in each] for each in memory.slots]
    own_slots, firsts, seconds, rest = slots[rank], slots[0], slots[1], slots[2:]
    base = fingerprint(signature.agreed) << SEQUENCE_BITS
    own, peer, fence, arrivals = memory.own, memory.others[0], memory.fence, ARRIVALS
    sees_by_one_word = size == 2 and fence is None
    acquire, release, arrive = engine.lock.acquire, engine.lock.release, check.check_at
    errstate, ring, recorder = engine.errstate.run, engine.recorder.ring, engine.recorder
    last, mean, ndarray, empty = CALLS_KEPT - 1, op is ReduceOp.MEAN, np.ndarray, np.empty

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
        inside = made = False
        sequence, start = -1, 0
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
                if not sees_by_one_word or peer[index] != word:
                    arrive(signature, word, sequence)
                errstate(fold, firsts[parity], seconds[parity], out)
                for slot in rest:
                    errstate(fold, out, slot[parity], out)
                if mean:
                    errstate(finish, op, out.reshape(-1), size)
                position = recorder.position
                ring[position & last] = (sequence, signature, SHARED, start, clock())
                recorder.position = position + 1
                made = True
                return out
            except BaseException as error:
                if check.sequence == sequence:
                    recorder.add((sequence, signature, SHARED, start, clock()))
                    engine.leave(error)
                raise
            finally:
                release()
        except BaseException as error:
            engine.unlock(error, inside, made)
            raise

    return all_reduce


# The other collectives, on flat buffers


def bind_broadcast(
    engine: Engine, signature: Signature, nbytes: int, root: int
) -> Callable[[Any, Array], Any]:
    """The function (None, buffer): the root's content in every rank's buffer."""
    move, publish = _component(engine, "broadcast", None, _BYTES, nbytes)

    def run(source: None, target: Array, index: int | None) -> None:
        move(None, target.view(_BYTES), (), root, index)

    return bind(engine, signature, run, publish)


def bind_reduce_scatter(
    engine: Engine, signature: Signature, op: ReduceOp, dtype: np.dtype[Any], lengths: Sequence[int]
) -> Callable[[Array, Array], Any]:
    """The function (source, target): `target` is this rank's part, `lengths` those of all."""
    size, mean, errstate = engine.size, op is ReduceOp.MEAN, engine.errstate.run
    nbytes = sum(lengths) * dtype.itemsize
    move, publish = _component(engine, "reduce_scatter", op, dtype, nbytes)

    def run(source: Array, target: Array, index: int | None) -> None:
        move(source, target, lengths, 0, index)
        if mean:
            errstate(finish, op, target, size)

    return bind(engine, signature, run, publish)


def bind_all_gather(
    engine: Engine, signature: Signature, count: int, room: int, row: int, dtype: np.dtype[Any]
) -> Callable[[Array, Array | None], Any]:
    """The function (source, target) → joined rows of `row` elements, flat.

    This rank gives `count` rows. Without a target memory is allocated; `room` is how many rows the
    target has, which ValueError on every rank is raised about where it isn't the sum of all.
    """
    exchange = None if engine.node is None else engine.node.addresses
    paths = engine.paths("all_gather", None, _BYTES)
    row_bytes, errstate = row * dtype.itemsize, engine.errstate.run

    def publish(index: int, source: Array, target: Array | None) -> None:
        assert exchange is not None
        exchange.publish(index, source, target, count, room)

    def run(source: Array, target: Array | None, index: int | None) -> tuple[Array, int]:
        if index is None or exchange is None:
            counts, rooms = zip(*numbers_of_all(engine, count, room), strict=True)
        else:
            addresses, counts, rooms = exchange.read(index)
        check_room(counts, rooms)
        lengths = [each * row_bytes for each in counts]
        total = sum(lengths)
        if target is None:
            target = np.empty(sum(counts) * row, dtype)
        given, filled = source.view(_BYTES), target.view(_BYTES)
        chosen = engine.choose("all_gather", total, paths) if engine.size > 1 else ""
        path = paths.get(chosen)
        if path is None:
            engine.run("all_gather", given, filled, lengths=lengths)
        elif index is not None and isinstance(path, PathSelector) and path.exchanges(total):
            arguments = addresses, total, given, filled, lengths, 0
            engine.path = errstate(path.run, *arguments)
        else:
            engine.path = errstate(path, given, filled, lengths, 0) or chosen
        return target, sum(counts)

    return bind(engine, signature, run, publish)


Move = Callable[[Array | None, Array, Sequence[int], int, int | None], None]


def _component(
    engine: Engine, collective: str, op: ReduceOp | None, dtype: np.dtype[Any], nbytes: int
) -> tuple[Move, Publish | None]:
    """What moves the data of a collective of so many bytes, and what it publishes before."""
    paths = engine.paths(collective, op, dtype)
    chosen = engine.choose(collective, nbytes, paths) if engine.size > 1 else ""
    path, errstate = paths.get(chosen), engine.errstate.run
    if path is None:
        return _schedule(engine, collective, op), None
    if not isinstance(path, PathSelector) or not path.exchanges(nbytes):
        return _plain(engine, path, chosen), None
    assert engine.node is not None
    exchange, select = engine.node.addresses, path.run

    def publish(index: int, source: Array | None, target: Array) -> None:
        exchange.publish(index, target if source is None else source, target, nbytes)

    def move(
        source: Array | None, target: Array, lengths: Sequence[int], root: int, index: int | None
    ) -> None:
        assert index is not None
        addresses, _, _ = exchange.read(index)
        engine.path = errstate(select, addresses, nbytes, source, target, lengths, root)

    return move, publish


def _plain(engine: Engine, path: Path, name: str) -> Move:
    errstate = engine.errstate.run

    def move(
        source: Array | None, target: Array, lengths: Sequence[int], root: int, index: int | None
    ) -> None:
        engine.path = errstate(path, source, target, lengths, root) or name

    return move


def _schedule(engine: Engine, collective: str, op: ReduceOp | None) -> Move:
    def move(
        source: Array | None, target: Array, lengths: Sequence[int], root: int, index: int | None
    ) -> None:
        engine.run(collective, source, target, lengths=lengths or None, op=op, root=root)

    return move
