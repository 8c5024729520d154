"""broadcast, all_gather, gather and scatter."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np

from collectives import algorithms
from collectives.arrays import Output, flat, given_output, like, to_numpy
from collectives.engine import Engine
from collectives.errors import DtypeMismatchError, ShapeMismatchError
from collectives.operations import Operation
from collectives.operations.arguments import Rows
from collectives.operations.objects import all_gather_object, broadcast_pickle, numbers_of_all
from collectives.reduction import Array
from collectives.schedule import split_lengths


def broadcast(array: Any, root: int, algorithm: str | None, *, on_root: bool) -> Operation:
    """The root's content in everybody's array."""
    algorithms.check_name("broadcast", algorithm)
    given = to_numpy(array)
    if on_root:
        # A schedule may write into the root's buffer what is there already.
        output = Output(flat(given if given.flags.writeable else given.copy()), lambda: array)
    else:
        output = given_output(array, given.shape, given.dtype, name="array")

    def perform(engine: Engine) -> Any:
        engine.run("broadcast", None, output.buffer, root=root, algorithm=algorithm)
        return output.deliver()

    return perform


def _counts_of_all(engine: Engine, rows: Rows) -> list[int]:
    """Every rank's number of rows; MismatchError on every rank where the rows differ in kind."""
    kind = (str(rows.dtype), f"rows of shape {rows.rest} along axis {rows.axis}")
    table = numbers_of_all(engine, [rows.count, zlib.crc32(repr(kind).encode())])
    if (table[:, 1] != table[0, 1]).any():
        kinds = all_gather_object(kind)(engine)
        calls = tuple(f"{shape}, {dtype}" for dtype, shape in kinds)
        error = DtypeMismatchError if len({dtype for dtype, _ in kinds}) > 1 else ShapeMismatchError
        raise error("the ranks' arrays can't be joined", calls)
    counts: list[int] = table[:, 0].tolist()
    return counts


def _with_own_rows(engine: Engine, rows: Rows, lengths: list[int], buffer: Array) -> Array:
    """`buffer`, which has room for all ranks' rows, with this rank's in their place."""
    engine.own_part(buffer, lengths)[:] = rows.flat
    return buffer


def all_gather(array: Any, axis: int, algorithm: str | None) -> Operation:
    """All ranks' arrays, joined along the axis in rank order."""
    algorithms.check_name("all_gather", algorithm)
    rows = Rows(to_numpy(array), axis)

    def perform(engine: Engine) -> Any:
        counts = _counts_of_all(engine, rows)
        lengths = [count * rows.elements for count in counts]
        joined = _with_own_rows(engine, rows, lengths, np.empty(sum(lengths), rows.dtype))
        engine.run("all_gather", None, joined, lengths=lengths, algorithm=algorithm)
        return like(array)(rows.array(joined, sum(counts)))

    return perform


def gather(array: Any, root: int, axis: int, algorithm: str | None) -> Operation:
    """All ranks' arrays, joined along the axis, on the root alone; None elsewhere."""
    algorithms.check_name("gather", algorithm)
    rows = Rows(to_numpy(array), axis)

    def perform(engine: Engine) -> Any:
        counts = _counts_of_all(engine, rows)
        lengths = [count * rows.elements for count in counts]
        on_root = engine.rank == root
        total = sum(lengths)
        buffer = np.empty(total, rows.dtype) if on_root else engine.work(total, rows.dtype)
        joined = _with_own_rows(engine, rows, lengths, buffer)
        engine.run("gather", None, joined, lengths=lengths, root=root, algorithm=algorithm)
        return like(array)(rows.array(joined, sum(counts))) if on_root else None

    return perform


class _Scattered(NamedTuple):
    """What the other ranks must know of the root's array."""

    rows: int
    rest: tuple[int, ...]
    axis: int
    dtype: np.dtype[Any]


def scatter(array: Any, root: int, axis: int, algorithm: str | None, *, on_root: bool) -> Operation:
    """Rank r's block, of `numpy.array_split` along the axis, of the root's array."""
    algorithms.check_name("scatter", algorithm)
    rows: list[Rows] = []

    def look() -> _Scattered:
        rows[:] = [Rows(to_numpy(array), axis)]
        return _Scattered(rows[0].count, rows[0].rest, rows[0].axis, rows[0].dtype)

    def perform(engine: Engine) -> Any:
        count, rest, place, dtype = broadcast_pickle(engine, look if on_root else None, root)
        counts = split_lengths(count, engine.size)
        lengths = (counts * int(np.prod(rest, dtype=np.int64))).tolist()
        whole = rows[0].flat if on_root else engine.work(sum(lengths), dtype)
        engine.run("scatter", None, whole, lengths=lengths, root=root, algorithm=algorithm)
        block = engine.own_part(whole, lengths).copy()
        shaped = block.reshape(counts[engine.rank], *rest)
        return like(array)(np.ascontiguousarray(np.moveaxis(shaped, 0, place)))

    return perform
