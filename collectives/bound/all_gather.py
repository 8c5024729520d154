"""The bound all_gather: counts, places and times travel in one exchange, and few rows with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.bound.bind import Call, bind
from collectives.bound.rows import RowsOfAll, rows_of_all
from collectives.caching import LRU
from collectives.calls import PASS
from collectives.calls.arguments import contiguous_apart
from collectives.calls.counts import check_room
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
) -> Callable[[Array, Array | None], Any]:
    """The function (array, out) → the joined rows, each of shape `rest`.

    This rank gives `count` rows. `out` has `room` rows: ValueError on every rank if that is not the
    sum (`check_room`). PASS where it can't take them as they come. The result has its final shape
    before the call ends, as of `bound.many`.
    """
    paths = engine.paths("all_gather", None, _BYTES)
    row_bytes, errstate = math.prod(rest) * dtype.itemsize, engine.errstate.run
    chosen: LRU[int, tuple[str, Path | None, bool]] = LRU()
    rows_of_ranks = rows_of_all(engine, count, room, rest, dtype, addressed=True)
    copies = rows_of_ranks.copies

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
        reader = rows_of_ranks.reader(counts)
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
        if reader is not None:
            reader(index, source, joined)
            return joined
        filled = joined.reshape(-1).view(_BYTES)
        # What `publish` has copied may overlap with the target.
        sent = (contiguous_apart(source, filled) if copies else source).view(_BYTES)
        if path is None:
            engine.run("all_gather", sent, filled, lengths=lengths)
        elif addressed and index is not None:
            engine.path = errstate(path.run, addresses, total, sent, filled, lengths, 0)
        else:
            engine.path = errstate(path, sent, filled, lengths, 0) or name
        return joined

    call = bind(engine, signature, run, rows_of_ranks.publish, rows_of_ranks.exchange)
    return _of_rows(call, rows_of_ranks, rest, dtype)


def _of_rows(
    call: Call, rows_of_ranks: RowsOfAll, rest: tuple[int, ...], dtype: np.dtype[Any]
) -> Callable[[Array, Array | None], Any]:
    """The function (array, out) of a call that joins rows into its target."""
    copies, ndarray = rows_of_ranks.copies, np.ndarray

    def call_with(array: Array, out: Array | None) -> Any:
        if out is not None and (
            type(out) is not ndarray
            or not out.flags.carray
            or out.dtype != dtype
            or out.shape[1:] != rest
        ):
            return PASS
        return call(array if copies else contiguous_apart(array, out), out)

    return call_with


def bind_gather(
    engine: Engine,
    signature: Signature,
    count: int,
    room: int,
    rest: tuple[int, ...],
    dtype: np.dtype[Any],
    root: int,
) -> Callable[[Array, Array | None], Any]:
    """The function (array, out) → the joined rows on the root, None elsewhere.

    As that of `bind_all_gather`, but that `out` counts on the root alone.
    """
    elements, on_root = math.prod(rest), engine.rank == root
    rows_of_ranks = rows_of_all(engine, count, room, rest, dtype)

    last: tuple[Any, ...] = (None,)

    def joined_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal last
        _, counts, rooms = given
        check_room(counts, rooms)
        lengths = [each * elements for each in counts]
        last = given, (sum(counts), *rest), lengths, rows_of_ranks.reader(counts)
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
        if reader is not None:
            reader(index, source, joined)
            return joined
        filled = joined.reshape(-1)
        own_part(filled, lengths, engine.rank)[:] = source.reshape(-1)
        engine.run("gather", None, filled, lengths=lengths, root=root)
        return joined if on_root else None

    call = bind(engine, signature, run, rows_of_ranks.publish, rows_of_ranks.exchange)
    return _of_rows(call, rows_of_ranks, rest, dtype)
