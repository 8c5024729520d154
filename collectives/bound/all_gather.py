"""The bound all_gather and gather: few rows travel with the counts, addresses and times."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives import algorithms
from collectives.arrays.kinds import after_reading, copied, is_device, like, may_overlap, to_array
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.bound.bind import Call, bind
from collectives.bound.calls import Bound, bound_operation
from collectives.bound.exchanged_rows import Reader
from collectives.bound.rows import RowsOfAll, rows_of_all
from collectives.caching import LRU
from collectives.calls import PASS, Operation
from collectives.calls.arguments import Rows, contiguous_apart
from collectives.calls.counts import ANY_ROOM, check_room
from collectives.calls.movements import rows_of, signature_of
from collectives.calls.objects import numbers_of_all
from collectives.consistency.signature import Signature, check_index
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.shm.addresses import Exchanged
from collectives.shm.selector import PathSelector
from collectives.shm.two_levels import Path

_BYTES = np.dtype(np.uint8)


class _Known(NamedTuple):
    """What follows from the numbers that the ranks have exchanged."""

    given: Exchanged
    addresses: Any
    shape: tuple[int, ...]
    """Of the joined rows."""
    lengths: list[int]
    """Each rank's bytes, whose sum is `total`."""
    total: int
    reader: Reader | None
    """Joins rows that travelled with the check of the call; None of more than do."""
    name: str
    path: Path | None
    """None: the engine runs the collective itself."""
    addressed: PathSelector | None
    """The path, if it reads at the addresses."""


def bind_all_gather(
    engine: Engine,
    signature: Signature,
    count: int,
    room: int,
    rest: tuple[int, ...],
    dtype: np.dtype[Any],
    algorithm: str | None = None,
) -> Callable[[Array, Array | None], Any]:
    """The function (array, out) → the joined rows, each of shape `rest`.

    The signature is that of an all_gather, or of a gather, whose root alone gets them: the other
    ranks get None. This rank gives `count` rows. `out` has `room` rows: ValueError on every rank if
    that is not the sum (`check_room`). PASS where it can't take them as they come. The result has
    its final shape before the call ends, as of `bound.many`. A forced algorithm moves all rows
    itself.
    """
    collective, root = signature.collective, signature.root or 0
    receives, errstate = signature.root in (None, engine.rank), engine.errstate.run
    forced = algorithm is not None
    rows_of_ranks = rows_of_all(engine, count, room, rest, dtype, travel=not forced)
    copies = rows_of_ranks.copies
    last: _Known | None = None
    known_of = _what_follows(engine, collective, rows_of_ranks, rest, dtype, forced=forced)

    def run(source: Array, target: Array | None, index: int | None) -> Array | None:
        nonlocal last
        given = rows_of_ranks.numbers(index)
        # Calls often repeat with the same buffers.
        if last is None or given is not last.given:
            last = known_of(given)
        _, addresses, shape, lengths, total, reader, name, path, addressed = last
        if reader is not None and not receives:
            return None
        joined = target
        if joined is None and receives:
            joined = np.empty(shape, dtype)
        if reader is not None:
            assert joined is not None
            reader(index, source, joined)
            return joined
        # What `publish` has copied may overlap with the target.
        sent = (contiguous_apart(source, joined) if copies else source).view(_BYTES)
        # Of a gather only the root has another target than the source.
        filled = sent if joined is None else joined.reshape(-1).view(_BYTES)
        if path is None:
            engine.run(collective, sent, filled, lengths=lengths, root=root, algorithm=algorithm)
        elif addressed is not None and index is not None:
            engine.path = errstate(addressed.run, addresses, total, sent, filled, lengths, root)
        else:
            engine.path = errstate(path, sent, filled, lengths, root) or name
        return joined

    call = bind(engine, signature, run, rows_of_ranks.publish, rows_of_ranks.exchange)
    return _on_arrays(call, rest, dtype, copies)


def _what_follows(
    engine: Engine,
    collective: str,
    rows_of_ranks: RowsOfAll,
    rest: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    forced: bool,
) -> Callable[[Any], _Known]:
    """The function of the exchanged numbers."""
    row_bytes, paths = math.prod(rest) * dtype.itemsize, engine.paths(collective, None, _BYTES)
    chosen: LRU[int, tuple[str, Path | None, PathSelector | None]] = LRU()

    def choose(total: int) -> tuple[str, Path | None, PathSelector | None]:
        """The path of so many bytes, and again if it reads at the exchanged addresses."""
        if forced:
            return "", None, None
        name = engine.choose(collective, total, paths) if engine.size > 1 else ""
        path = paths.get(name)
        if isinstance(path, PathSelector) and path.exchanges(total):
            return name, path, path
        return name, path, None

    def known_of(given: Any) -> _Known:
        addresses, counts, rooms = given
        check_room(counts, rooms)
        rows, lengths = sum(counts), [each * row_bytes for each in counts]
        total = rows * row_bytes
        reader = rows_of_ranks.reader(counts)
        name, path, addressed = chosen.get(total) or chosen.put(total, choose(total))
        # Ranks with few rows publish no address: where others have more, they are exchanged anew.
        if addressed is not None and not all(addresses.source_addresses):
            addressed = None
        shape = rows, *rest
        return _Known(given, addresses, shape, lengths, total, reader, name, path, addressed)

    return known_of


def _on_arrays(
    call: Call, rest: tuple[int, ...], dtype: np.dtype[Any], copies: bool
) -> Callable[[Array, Array | None], Any]:
    """A call on contiguous rows as one on any. PASS where `out` can't take them as they come."""
    ndarray = np.ndarray

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


def all_gather(
    engine: Engine, array: Any, *, axis: int = 0, out: Any = None, algorithm: str | None = None
) -> Operation:
    """All ranks' arrays, joined along the axis in rank order."""
    return _join("all_gather", engine, array, axis, out, algorithm, None)


def gather(
    engine: Engine,
    array: Any,
    *,
    root: int = 0,
    axis: int = 0,
    out: Any = None,
    algorithm: str | None = None,
) -> Operation:
    """All ranks' arrays, joined along the axis, on the root alone; None elsewhere."""
    root = check_index("root", root, engine.size)
    return _join("gather", engine, array, axis, out, algorithm, root)


def _join(
    collective: str,
    engine: Engine,
    array: Any,
    axis: Any,
    out: Any,
    algorithm: str | None,
    root: int | None,
) -> Operation:
    """all_gather, or gather to a root."""
    detail = algorithms.forced(collective, algorithm)
    rows = Rows(to_array(array), axis)
    receives = root in (None, engine.rank)
    if not receives:
        out = None
    if out is None or root is not None:
        refuse_lost_gradient(array, "array")
    room = ANY_ROOM if out is None else rows_of(out, rows)
    signature = signature_of(collective, rows, root, detail)
    if is_device(rows.flat):
        run = partial(_join_on_gpu, signature, rows, array, out, room, algorithm, receives)
        return Operation(signature, run, on_gpu=True)
    output = None if out is None else rows.output(out, room, rows.dtype, array)
    target = None if output is None else output.buffer.reshape(room, *rows.rest)

    def binder(engine: Engine) -> Bound:
        return bind_all_gather(
            engine, signature, rows.count, room, rows.rest, rows.dtype, algorithm
        )

    def deliver(joined: Array | None) -> Any:
        if output is not None:
            return output.deliver()
        return None if joined is None else like(array)(rows.array(joined, len(joined)))

    shape = rows.count, *rows.rest
    key = collective, rows.dtype, shape, room, rows.axis, root
    source = rows.flat.reshape(shape)
    return bound_operation(signature, key, binder, source, target, deliver, algorithm)


def _join_on_gpu(
    signature: Signature,
    rows: Rows,
    array: Any,
    out: Any,
    room: int,
    algorithm: str | None,
    receives: bool,
    engine: Engine,
) -> Any:
    """As `_join`: the numbers of rows are exchanged first."""
    counts, rooms = zip(*numbers_of_all(engine, rows.count, room), strict=True)
    check_room(counts, rooms)
    lengths, root = [count * rows.elements for count in counts], signature.root or 0
    source = target = rows.flat
    result = rows.output(out, sum(counts), rows.dtype, array) if receives else None
    if result is not None:
        target = result.buffer
        if may_overlap(source, target):
            source = copied(source)
    engine.run(
        signature.collective, source, target, lengths=lengths, root=root, algorithm=algorithm
    )
    if result is not None:
        return result.deliver()
    after_reading(array)
    return None
