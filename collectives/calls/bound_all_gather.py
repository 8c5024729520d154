"""The bound all_gather: counts, places and times travel in one exchange, and few rows with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.caching import LRU
from collectives.calls.bound import bind
from collectives.calls.counts import check_room
from collectives.calls.rows import rows_of_all
from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.shm.selector import PathSelector
from collectives.shm.two_levels import Path
from collectives.transports.base import own_part

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
    paths = engine.paths("all_gather", None, _BYTES)
    row_bytes, errstate = math.prod(rest) * dtype.itemsize, engine.errstate.run
    chosen: LRU[int, tuple[str, Path | None, bool]] = LRU()
    rows_of_ranks = rows_of_all(engine, count, room, count * row_bytes, addressed=True)

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
        reader = rows_of_ranks.reader(lengths)
        name, path, addressed = chosen.get(total) or chosen.put(total, choose(total))
        # Ranks with few rows publish no address: where others have more, they are exchanged anew.
        addressed = addressed and all(addresses.source_addresses)
        last = given, addresses, (rows, *rest), lengths, total, reader, name, path, addressed
        return last

    def run(source: Array, target: Array | None, index: int | None) -> Array:
        given = rows_of_ranks.numbers(index)
        known = last if given is last[0] else joined_of(given)
        _, addresses, shape, lengths, total, reader, name, path, addressed = known
        joined = np.empty(shape, dtype) if target is None else target
        filled = joined.reshape(-1).view(_BYTES)
        sent = source.view(_BYTES)
        if reader is not None:
            reader(index, sent, filled)
            return joined
        if path is None:
            engine.run("all_gather", sent, filled, lengths=lengths)
        elif addressed and index is not None:
            engine.path = errstate(path.run, addresses, total, sent, filled, lengths, 0)
        else:
            engine.path = errstate(path, sent, filled, lengths, 0) or name
        return joined

    return bind(engine, signature, run, rows_of_ranks.publish, rows_of_ranks.exchange)


def bind_gather(
    engine: Engine,
    signature: Signature,
    count: int,
    room: int,
    rest: tuple[int, ...],
    dtype: np.dtype[Any],
    root: int,
) -> Callable[[Array, Array | None], Array | None]:
    """The function (source, target) → the joined rows on the root, None elsewhere.

    A given target, of the root, is as that of `bind_all_gather`.
    """
    elements, on_root = math.prod(rest), engine.rank == root
    rows_of_ranks = rows_of_all(engine, count, room, count * elements * dtype.itemsize)

    last: tuple[Any, ...] = (None,)

    def joined_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal last
        _, counts, rooms = given
        check_room(counts, rooms)
        lengths = [each * elements for each in counts]
        reader = rows_of_ranks.reader([each * dtype.itemsize for each in lengths])
        last = given, (sum(counts), *rest), lengths, reader
        return last

    def run(source: Array, target: Array | None, index: int | None) -> Array | None:
        given = rows_of_ranks.numbers(index)
        _, shape, lengths, reader = last if given is last[0] else joined_of(given)
        if reader is not None and not on_root:
            return None
        if not on_root:
            joined = engine.work(sum(lengths), dtype)
        else:
            joined = np.empty(shape, dtype) if target is None else target
        filled = joined.reshape(-1)
        if reader is not None:
            reader(index, source.view(_BYTES), filled.view(_BYTES))
            return joined
        own_part(filled, lengths, engine.rank)[:] = source
        engine.run("gather", None, filled, lengths=lengths, root=root)
        return joined if on_root else None

    return bind(engine, signature, run, rows_of_ranks.publish, rows_of_ranks.exchange)
