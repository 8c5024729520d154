"""The bound all_gather: counts, places and times travel in one exchange, and few rows with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.caching import LRU
from collectives.calls.bound import bind
from collectives.calls.bound_small import SmallRows, node_of_all
from collectives.calls.counts import check_room
from collectives.calls.objects import numbers_of_all
from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.shm.addresses import NOWHERE, AddressExchange, Publish
from collectives.shm.node import Path
from collectives.shm.selector import PathSelector

_BYTES = np.dtype(np.uint8)


def bind_all_gather(
    engine: Engine,
    signature: Signature,
    count: int,
    room: int,
    rest: tuple[int, ...],
    dtype: np.dtype[Any],
) -> Callable[[Array, Array | None], Array]:
    """The function (source, target) → the joined rows, each of shape `rest`.

    This rank sends `count` rows. A given target is flat, and returned; `room` is the number of rows
    that it holds (`check_room` raises ValueError on every rank if that is not the sum). The result
    has its final shape before the call ends, as of `bound_many`.
    """
    exchange = None if engine.node is None else engine.node.addresses
    paths = engine.paths("all_gather", None, _BYTES)
    row_bytes, errstate = math.prod(rest) * dtype.itemsize, engine.errstate.run
    chosen: LRU[int, tuple[str, Path | None, bool]] = LRU()
    node = node_of_all(engine)
    small = None if node is None else SmallRows(node)

    def choose(total: int) -> tuple[str, Path | None, bool]:
        """The path of so many bytes, and whether it uses the exchanged addresses."""
        name = engine.choose("all_gather", total, paths) if engine.size > 1 else ""
        path = paths.get(name)
        return name, path, isinstance(path, PathSelector) and path.exchanges(total)

    last: tuple[Any, ...] = (None,)

    def joined_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
        """What follows from the exchanged numbers; calls often repeat with the same buffers."""
        nonlocal last
        addresses, counts, rooms = given
        check_room(counts, rooms)
        rows, lengths = sum(counts), [each * row_bytes for each in counts]
        total = rows * row_bytes
        reader = None if small is None else small.reader(lengths)
        name, path, addressed = chosen.get(total) or chosen.put(total, choose(total))
        # Ranks with few rows publish no address: where others have more, they are exchanged anew.
        addressed = addressed and all(addresses.source_addresses)
        last = given, addresses, (rows, *rest), lengths, total, reader, name, path, addressed
        return last

    def run(source: Array, target: Array | None, index: int | None) -> Array:
        if index is None or exchange is None:
            counts, rooms = zip(*numbers_of_all(engine, count, room), strict=True)
            given = NOWHERE, counts, rooms
        else:
            given = exchange.read(index)
        known = last if given is last[0] else joined_of(given)
        _, addresses, shape, lengths, total, reader, name, path, addressed = known
        joined = np.empty(shape, dtype) if target is None else target
        filled = joined.reshape(-1).view(_BYTES)
        if reader is not None:
            reader(index, filled)
            return joined
        sent = source.view(_BYTES)
        if path is None:
            engine.run("all_gather", sent, filled, lengths=lengths)
        elif addressed and index is not None:
            engine.path = errstate(path.run, addresses, total, sent, filled, lengths, 0)
        else:
            engine.path = errstate(path, sent, filled, lengths, 0) or name
        return joined

    publish = _publish_few(exchange, small, count, room, count * row_bytes)
    if publish is None and exchange is not None:
        publish = exchange.publisher(count, room)
    return bind(engine, signature, run, publish)


def bind_gather(
    engine: Engine,
    signature: Signature,
    count: int,
    rest: tuple[int, ...],
    dtype: np.dtype[Any],
    root: int,
) -> Callable[[Array, None], Array | None]:
    """The function (source, None) → the joined rows on the root, None elsewhere."""
    exchange = None if engine.node is None else engine.node.addresses
    row_bytes, on_root = math.prod(rest) * dtype.itemsize, engine.rank == root
    node = node_of_all(engine)
    small = None if node is None else SmallRows(node)
    readers: LRU[tuple[int, ...], Callable[[int, Array], None] | None] = LRU()

    def reader_of(counts: tuple[int, ...]) -> Callable[[int, Array], None] | None:
        if small is None:
            return None
        if counts not in readers:
            readers.put(counts, small.reader([each * row_bytes for each in counts]))
        return readers[counts]

    def run(source: Array, target: None, index: int | None) -> Array | None:
        if index is None or exchange is None:
            counts, _ = zip(*numbers_of_all(engine, count, 0), strict=True)
        else:
            _, counts, _ = exchange.read(index)
        rows, reader = sum(counts), reader_of(counts)
        if reader is not None and index is not None:
            if not on_root:
                return None
            joined = np.empty((rows, *rest), dtype)
            reader(index, joined.reshape(-1).view(_BYTES))
            return joined
        lengths = [each * math.prod(rest) for each in counts]
        joined = np.empty((rows, *rest), dtype) if on_root else engine.work(sum(lengths), dtype)
        filled = joined.reshape(-1)
        engine.own_part(filled, lengths)[:] = source
        engine.run("gather", None, filled, lengths=lengths, root=root)
        return joined if on_root else None

    publish = _publish_few(exchange, small, count, 0, count * row_bytes)
    if publish is None and exchange is not None:
        publish = exchange.numbers_publisher(count, 0)
    return bind(engine, signature, run, publish)


def _publish_few(
    exchange: AddressExchange | None, small: SmallRows | None, count: int, room: int, nbytes: int
) -> Publish | None:
    """Publishes these numbers, and this rank's rows if they are few; None where they aren't."""
    if exchange is None or small is None or not small.few(nbytes):
        return None
    return _publish_rows(exchange.numbers_publisher(count, room), small.storer(nbytes))


def _publish_rows(numbers: Publish, store: Callable[[int, Array], None]) -> Publish:
    def publish(index: int, source: Array | None, target: Array | None) -> None:
        assert source is not None
        numbers(index, source, target)
        store(index, source.view(_BYTES))

    return publish
