"""The bound all_to_all of parts that are alike on all ranks, as most programs send them.

Whether they are is not part of the agreed call: a rank may send others. Each rank publishes the
kind of its parts beside its arrival, 0 if they differ, and all ranks compare the kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.arrays.kinds import is_device, to_array
from collectives.bound.bind import Call, bind
from collectives.bound.calls import bound_operation
from collectives.bound.rows import rows_between_nodes
from collectives.bound.small import Run, node_of_all
from collectives.calls import PASS, Operation
from collectives.calls.all_to_all import (
    Parts,
    exchange,
    exchange_between_gpus,
    exchange_bytes,
    store,
)
from collectives.calls.arguments import contiguous_apart
from collectives.consistency.signature import Signature, dtype_name, fingerprint
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.schedules.paths import NATIVE, QUICKEST, STAGED
from collectives.shm import migratory
from collectives.shm.addresses import FIRST_NUMBER, Publish
from collectives.shm.layout import ARRIVALS, DATA, ROW_BYTES, SMALL_BYTES
from collectives.shm.node import Node
from collectives.shm.selector import LARGEST_NATIVE, PathSelector

_BYTES = np.dtype(np.uint8)
_DIFFERENT = 0
# Between nodes every rank gets all parts of few bytes, of which it needs its own.
EXCHANGED_BYTES = 4 << 10


def bind_differing(engine: Engine, nbytes: int) -> Call:
    """The function (arrays, None) → the received arrays; this rank's differ, and have `nbytes`."""
    signature, node = Signature("all_to_all", nbytes=nbytes), node_of_all(engine)
    if node is not None:
        publish = node.addresses.numbers_publisher(_DIFFERENT, 0)
        return bind(engine, signature, lambda arrays, *_: exchange(engine, arrays), publish)
    rows = rows_between_nodes(engine, _DIFFERENT, 0, 0)

    def run(arrays: Any, target: Any, index: int | None) -> list[Array]:
        # As the ranks whose parts are alike do, with the same messages.
        rows.numbers(index)
        return exchange(engine, arrays)

    return bind(engine, signature, run, exchange=rows.exchange)


def bind_forced(engine: Engine, signature: Signature, algorithm: str) -> Call:
    """The function (arrays, None) → the received arrays, which the algorithm moves."""
    return bind(engine, signature, lambda arrays, *_: exchange(engine, arrays, algorithm))


def bind_all_to_all(engine: Engine, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Call:
    """The function (source, target): both are flat and hold one part for each rank.

    `shape` is that of a part. The function returns None, or the received arrays, which the target
    does not hold, where any rank's parts are not of this shape and dtype.
    """
    to_array(np.empty(0, dtype))  # refuses dtypes that can't be sent
    kind = fingerprint((dtype_name(dtype), shape))
    count, size, node = math.prod(shape), engine.size, node_of_all(engine)
    nbytes = count * size * dtype.itemsize
    if node is None:
        return _bind_between_nodes(engine, shape, dtype, kind)
    words = node.steps.memory.words
    few = nbytes <= room_of_parts(size)
    made = _small(node, count, dtype, kind) if few else _large(engine, node, nbytes, kind)
    move, publish = made

    def run(source: Array, target: Array, index: int | None) -> list[Array] | None:
        assert index is not None
        if [each[index + FIRST_NUMBER] for each in words].count(kind) == size:
            move(source, target, index)
            return None
        return exchange(engine, _parts(source, size, shape))

    return bind(engine, Signature("all_to_all", nbytes=nbytes), run, publish)


def bind_equal(
    engine: Engine, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → result, of that shape: equal parts, divided by the first axis.

    PASS where `out` can't take the result as it comes. The function raises a MismatchError where
    any rank's parts differ from this one's.
    """
    part, ndarray, empty = (shape[0] // engine.size, *shape[1:]), np.ndarray, np.empty
    call = bind_all_to_all(engine, part, dtype)

    def all_to_all(array: Array, out: Any) -> Any:
        nonlocal call
        if out is None:
            result = empty(shape, dtype)
        elif (
            type(out) is ndarray and out.flags.carray and out.shape == shape and out.dtype == dtype
        ):
            result = out
        else:
            return PASS
        source, target = contiguous_apart(array, out), result.reshape(-1)
        differing = call(source, target)
        if differing is PASS:
            # Bound before another thread made the first registered array.
            call = bind_all_to_all(engine, part, dtype)
            differing = call(source, target)
        if differing is not None:
            # After the call: `whole` around all of it would cost every call time.
            try:
                store(differing, list(result.reshape(engine.size, *part)))
            except BaseException as error:
                engine.leave(error)
                raise
        return result

    return all_to_all


def room_of_parts(size: int) -> int:
    """The most bytes of so many equal parts of which a node's ranks store those of the others."""
    return SMALL_BYTES * size // (size - 1)


def _small(node: Node, count: int, dtype: np.dtype[Any], kind: int) -> tuple[Run, Publish]:
    """Each rank stores the others' parts beside its arrival, behind the kind; they copy them."""
    memory, rank, size = node.steps.memory, node.steps.rank, node.steps.size
    nbytes, own = (size - 1) * count * dtype.itemsize, memory.own
    kept, before, after = _part(rank, count), slice(rank * count), slice((rank + 1) * count, None)

    def stored(peer: int, parity: int) -> Array:
        """What a rank stores: the parts of all others."""
        elements: Array = memory.slots[peer][parity][ROW_BYTES:][:nbytes].view(dtype)
        return elements

    stores: dict[int, list[tuple[slice, Array]]] = {}
    reads: dict[int, list[tuple[slice, Array]]] = {}
    for parity, at in enumerate(ARRIVALS):
        mine = stored(rank, parity)
        pieces = (before, mine[before]), (after, mine[rank * count :])
        stores[at + DATA] = [(part, place) for part, place in pieces if len(place)]
        reads[at + DATA] = [
            (_part(peer, count), stored(peer, parity)[_part(rank - (rank > peer), count)])
            for peer in range(size)
            if peer != rank
        ]

    def publish(index: int, source: Array | None, target: Array | None) -> None:
        assert source is not None
        own[index + FIRST_NUMBER] = kind
        for part, place in stores[index]:
            place[...] = source[part]

    take = migratory.taker(size, {index: read[0][1] for index, read in reads.items()})

    def move(source: Any, target: Any, index: int | None) -> None:
        assert index is not None
        target[kept] = source[kept]
        for part, content in reads[index]:
            target[part] = content
        if take is not None:
            take(index)

    return move, publish


def _part(number: int, count: int) -> slice:
    return slice(number * count, (number + 1) * count)


def _large(engine: Engine, node: Node, nbytes: int, kind: int) -> tuple[Run, Publish]:
    """By the data path that was fastest lately."""
    path = engine.paths("all_to_all_equal", None, _BYTES)[QUICKEST]
    assert isinstance(path, PathSelector)
    lengths = [nbytes // engine.size] * engine.size
    errstate, read, addressed = engine.errstate.run, node.addresses.read, path.exchanges(nbytes)

    def move(source: Any, target: Any, index: int | None) -> None:
        assert index is not None
        given, filled = source.view(_BYTES), target.view(_BYTES)
        if addressed:
            addresses, _, _ = read(index)
            engine.path = errstate(path.run, addresses, nbytes, given, filled, lengths, 0)
        else:
            engine.path = errstate(path, given, filled, lengths, 0) or STAGED

    return move, node.addresses.publisher(kind)


def _bind_between_nodes(
    engine: Engine, shape: tuple[int, ...], dtype: np.dtype[Any], kind: int
) -> Call:
    """The kinds travel with the check, and few bytes too: each rank gets the parts of all."""
    size, rank, part = engine.size, engine.rank, math.prod(shape) * dtype.itemsize
    nbytes = part * size
    few = nbytes <= EXCHANGED_BYTES
    rows = rows_between_nodes(engine, kind, 0, nbytes if few else 0)
    reader = rows.reader([nbytes] * size) if few else None
    every = np.empty((size, size, part) if reader else 0, _BYTES)
    paths = engine.paths("all_to_all_equal", None, _BYTES) if nbytes <= LARGEST_NATIVE else {}
    native = paths.get(NATIVE)

    def run(source: Array, target: Array, index: int | None) -> list[Array] | None:
        _, kinds, _ = rows.numbers(index)
        if kinds.count(kind) != size:
            return exchange(engine, _parts(source, size, shape))
        outgoing, incoming = source.view(_BYTES), target.view(_BYTES)
        if reader is not None:
            reader(index, None, every)
            incoming.reshape(size, part)[...] = every[:, rank]
        elif native is not None:
            engine.path = NATIVE
            native(outgoing, incoming, (), 0)
        else:
            _by_messages(engine, outgoing.reshape(size, part), incoming.reshape(size, part))
        return None

    signature = Signature("all_to_all", nbytes=nbytes)
    return bind(engine, signature, run, exchange=rows.exchange)


def _parts(source: Array, size: int, shape: tuple[int, ...]) -> list[Array]:
    """The parts of that shape as arrays: iteration gives scalars of parts without axes."""
    whole = source.reshape(size, *shape)
    return [whole[index, ...] for index in range(size)]


def _by_messages(engine: Engine, outgoing: Array, incoming: Array) -> None:
    """The parts of bytes to and from each rank, whose lengths are known."""
    rank, lengths = engine.rank, [outgoing.shape[1]] * engine.size
    lengths[rank] = 0
    sent = [[part] for part in outgoing]
    received = exchange_bytes(engine, sent, lengths, lengths, "pairwise")
    for peer in range(engine.size):
        incoming[peer] = outgoing[rank] if peer == rank else received[peer]


def all_to_all(
    engine: Engine, arrays: Any, *, out: Any = None, algorithm: str | None = None
) -> Operation:
    """Send arrays[i] to rank i; entry i of the result was sent by rank i."""
    detail = algorithms.forced("all_to_all", algorithm)
    parts, name = Parts(arrays, engine.size, out), "all_to_all"
    given, nbytes, first = parts.arrays, parts.nbytes, parts.arrays[0]
    signature = Signature(name, detail=detail, nbytes=nbytes)
    devices = list(map(is_device, given))
    if any(devices):
        if not all(devices):
            raise TypeError(
                "arrays: some lie on a GPU, some on the CPU: must all lie in the same memory"
            )

        def run(engine: Engine) -> Any:
            return parts.deliver(exchange_between_gpus(engine, given, algorithm))

        return Operation(signature, run, on_gpu=True)
    if algorithm is not None:
        binder = partial(bind_forced, signature=signature, algorithm=algorithm)
        key: tuple[Any, ...] = (name, nbytes)
        return bound_operation(signature, key, binder, given, None, parts.deliver, algorithm)
    if parts.whole is not None:
        whole, output = parts.whole
        key = name, "equal", whole.dtype, whole.shape, None
        binder = partial(bind_equal, shape=whole.shape, dtype=whole.dtype)
        target = output.buffer.reshape(whole.shape)
        return bound_operation(signature, key, binder, whole, target, lambda _: output.deliver())
    if not parts.alike:
        binder = partial(bind_differing, nbytes=nbytes)
        return bound_operation(signature, (name, nbytes), binder, given, None, parts.deliver)
    # In the dtype that other ranks send, also where NumPy would choose another.
    source = np.concatenate([array.reshape(-1) for array in given], dtype=first.dtype)
    received = np.empty((len(given), *first.shape), first.dtype)

    def deliver(differing: Any) -> Any:
        return parts.deliver(differing or [received[peer, ...] for peer in range(len(given))])

    key = name, None, source.dtype, first.shape, None
    binder = partial(bind_all_to_all, shape=first.shape, dtype=source.dtype)
    return bound_operation(signature, key, binder, source, received.reshape(-1), deliver)
