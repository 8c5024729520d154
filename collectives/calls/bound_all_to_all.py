"""The bound all_to_all of parts that are alike on all ranks, as most programs send them.

Whether they are is not part of the agreed call: a rank may send others. Each rank publishes the
kind of its parts beside its arrival, 0 if they differ, and all ranks compare the kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays.kinds import to_array
from collectives.calls.all_to_all import exchange, exchange_bytes
from collectives.calls.bound import Call, Run, bind
from collectives.calls.bound_small import DATA, node_of_all
from collectives.calls.objects import numbers_of_all
from collectives.consistency.signature import Signature, dtype_name, fingerprint
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.schedules.paths import QUICKEST, STAGED
from collectives.shm.addresses import FIRST_NUMBER, Publish
from collectives.shm.layout import ARRIVALS, ROW_BYTES, SMALL_BYTES
from collectives.shm.node import Node
from collectives.shm.selector import PathSelector

_BYTES = np.dtype(np.uint8)
_DIFFERENT = 0


def bind_differing(engine: Engine, nbytes: int) -> Call:
    """The function (arrays, None) → the received arrays; this rank's differ, and have `nbytes`."""
    own = None if engine.node is None else engine.node.steps.memory.own

    def publish(index: int, source: Any, target: Any) -> None:
        assert own is not None
        own[index + FIRST_NUMBER] = _DIFFERENT

    def run(arrays: Any, target: Any, index: int | None) -> list[Array]:
        if index is None:
            numbers_of_all(engine, _DIFFERENT)
        return exchange(engine, arrays)

    return bind(engine, Signature("all_to_all", nbytes=nbytes), run, publish)


def bind_all_to_all(engine: Engine, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Call:
    """The function (source, target): both are flat and hold one part for each rank.

    `shape` is that of a part. The function returns None, or the received arrays, which the target
    does not hold, where any rank's parts are not of this shape and dtype.
    """
    to_array(np.empty(0, dtype))  # refuses dtypes that can't be sent
    kind = fingerprint((dtype_name(dtype), shape))
    count, size, node = math.prod(shape), engine.size, node_of_all(engine)
    nbytes = count * size * dtype.itemsize
    move, publish = _between_nodes(engine, count), None
    words: Sequence[memoryview] = ()
    if node is not None:
        words = node.steps.memory.words
        small = nbytes <= SMALL_BYTES
        made = _small(node, count, dtype, kind) if small else _large(engine, node, nbytes, kind)
        move, publish = made

    def run(source: Array, target: Array, index: int | None) -> list[Array] | None:
        if index is None:
            kinds = [each for each, _ in numbers_of_all(engine, kind)]
        else:
            kinds = [each[index + FIRST_NUMBER] for each in words]
        if kinds.count(kind) == size:
            move(source, target, index)
            return None
        parts = source.reshape(size, *shape)
        return exchange(engine, [parts[peer, ...] for peer in range(size)])

    return bind(engine, Signature("all_to_all", nbytes=nbytes), run, publish)


def _small(node: Node, count: int, dtype: np.dtype[Any], kind: int) -> tuple[Run, Publish]:
    """Each rank stores its parts beside its arrival, behind the kind; the others copy theirs."""
    memory, rank, size = node.steps.memory, node.steps.rank, node.steps.size
    nbytes = count * size * dtype.itemsize

    def place(peer: int, parity: int) -> Array:
        elements: Array = memory.slots[peer][parity][ROW_BYTES:][:nbytes].view(dtype)
        return elements

    own = memory.own
    stores = {at + DATA: place(rank, parity) for parity, at in enumerate(ARRIVALS)}
    reads = {
        at + DATA: [
            (slice(peer * count, (peer + 1) * count), place(peer, parity)[rank * count :][:count])
            for peer in range(size)
        ]
        for parity, at in enumerate(ARRIVALS)
    }

    def publish(index: int, source: Array | None, target: Array | None) -> None:
        own[index + FIRST_NUMBER] = kind
        stores[index][...] = source

    def move(source: Any, target: Any, index: int | None) -> None:
        assert index is not None
        for part, content in reads[index]:
            target[part] = content

    return move, publish


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


def _between_nodes(engine: Engine, count: int) -> Callable[[Array, Array, int | None], None]:
    """By messages, whose lengths are known."""
    rank, size = engine.rank, engine.size

    def move(source: Array, target: Array, index: int | None) -> None:
        outgoing, incoming = source.reshape(size, count), target.reshape(size, count)
        lengths = [outgoing[0].nbytes] * size
        lengths[rank] = 0
        writes = [_writer(part) for part in outgoing]
        received = exchange_bytes(engine, writes, lengths, lengths)
        incoming[rank] = outgoing[rank]
        for peer in range(size):
            if peer != rank:
                incoming[peer] = received[peer].view(source.dtype)

    return move


def _writer(part: Array) -> Callable[[Array], None]:
    content = part.view(_BYTES)

    def write(buffer: Array) -> None:
        buffer[...] = content

    return write
