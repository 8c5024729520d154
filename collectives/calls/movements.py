"""broadcast, all_gather, gather and scatter."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives import algorithms
from collectives.arrays.kinds import (
    Output,
    empty,
    flat,
    given_output,
    is_device,
    is_writeable,
    like,
    may_overlap,
    packed,
    to_array,
)
from collectives.arrays.tensors import refuse_false_gradient, refuse_lost_gradient
from collectives.calls import Operation
from collectives.calls.arguments import Rows
from collectives.calls.counts import ANY_ROOM, counts_of_all
from collectives.calls.objects import broadcast_pickle
from collectives.consistency.signature import ANY_LENGTH, Signature, dtype_name, forced
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.schedules.schedule import split_lengths


def broadcast(array: Any, root: int, algorithm: str | None, *, on_root: bool) -> Operation:
    """The root's content in every rank's array."""
    algorithms.check_name("broadcast", algorithm)
    given = to_array(array)
    output = broadcast_output(given, array, on_root=on_root)

    def perform(engine: Engine) -> Any:
        engine.run("broadcast", None, output.buffer, root=root, algorithm=algorithm)
        return output.deliver()

    return Operation(broadcast_signature(given, root, algorithm), perform, is_device(given))


def broadcast_output(given: Array, array: Any, *, on_root: bool) -> Output:
    """The buffer of a broadcast of `array`, which is `given` as NumPy or CuPy sees it.

    Raises ValueError or TypeError where this rank's array can't be written and it isn't the root.
    """
    refuse_false_gradient(array, "array")
    if on_root:
        # A schedule may write into the root's buffer what is there already.
        return Output(flat(given if is_writeable(given, array) else given.copy()), lambda: array)
    return given_output(array, given.shape, given.dtype, name="array")


def broadcast_signature(given: Array, root: int, algorithm: str | None) -> Signature:
    """The call that sends the root's array."""
    shape, dtype, detail = given.shape, dtype_name(given.dtype), forced(algorithm)
    return Signature("broadcast", None, dtype, shape, root, detail, given.nbytes)


def signature_of(collective: str, rows: Rows, root: int | None, algorithm: str | None) -> Signature:
    """The call that joins rows, whose number each rank chooses."""
    shape, dtype, nbytes = rows.shape(ANY_LENGTH), dtype_name(rows.dtype), rows.flat.nbytes
    return Signature(collective, None, dtype, shape, root, forced(algorithm), nbytes)


def all_gather(array: Any, axis: int, out: Any, algorithm: str | None) -> Operation:
    """All ranks' arrays, joined along the axis in rank order."""
    algorithms.check_name("all_gather", algorithm)
    rows = Rows(to_array(array), axis)
    if out is None:
        refuse_lost_gradient(array, "array")
    room = ANY_ROOM if out is None else rows_of(out, rows)

    def perform(engine: Engine) -> Any:
        counts = counts_of_all(engine, rows.count, room)
        lengths = [count * rows.elements for count in counts]
        result = rows.output(out, sum(counts), rows.dtype, array)
        source, target = rows.flat, result.buffer
        if out is not None and may_overlap(source, target):
            source = source.copy()
        engine.run("all_gather", source, target, lengths=lengths, algorithm=algorithm)
        return result.deliver()

    signature = signature_of("all_gather", rows, None, algorithm)
    return Operation(signature, perform, is_device(rows.flat))


def rows_of(out: Any, rows: Rows) -> int:
    """How many rows `out` holds; ValueError or TypeError where it can't hold any such."""
    shape = to_array(out, "out").shape
    count = shape[rows.axis] if len(shape) > rows.axis else 0
    rows.output(out, count, rows.dtype, out)
    return count


def gather(array: Any, root: int, axis: int, algorithm: str | None) -> Operation:
    """All ranks' arrays, joined along the axis, on the root alone; None elsewhere."""
    algorithms.check_name("gather", algorithm)
    rows = Rows(to_array(array), axis)
    refuse_lost_gradient(array, "array")

    def perform(engine: Engine) -> Any:
        counts = counts_of_all(engine, rows.count)
        lengths = [count * rows.elements for count in counts]
        on_root = engine.rank == root
        total = sum(lengths)
        if on_root:
            joined = empty(total, rows.dtype, rows.flat)
        else:
            joined = engine.work(total, rows.dtype, rows.flat)
        engine.own_part(joined, lengths)[:] = rows.flat
        engine.run("gather", None, joined, lengths=lengths, root=root, algorithm=algorithm)
        return like(array)(rows.array(joined, sum(counts))) if on_root else None

    signature = signature_of("gather", rows, root, algorithm)
    return Operation(signature, perform, is_device(rows.flat))


class _Scattered(NamedTuple):
    """What the other ranks must know of the root's array."""

    rows: int
    rest: tuple[int, ...]
    axis: int
    dtype: np.dtype[Any]
    on_gpu: bool


def scatter(array: Any, root: int, axis: int, algorithm: str | None, *, on_root: bool) -> Operation:
    """Rank r's block, of `numpy.array_split` along the axis, of the root's array."""
    algorithms.check_name("scatter", algorithm)
    rows: list[Rows] = []

    def look(engine: Engine) -> _Scattered:
        rows[:] = [Rows(to_array(array), axis)]
        refuse_lost_gradient(array, "array")
        on_gpu = is_device(rows[0].flat)
        if on_gpu and engine.devices is None:
            # The other ranks have started the call where arrays on the CPU are moved.
            raise TypeError("scatter_async: the array lies on a GPU: must lie on the CPU")
        return _Scattered(rows[0].count, rows[0].rest, rows[0].axis, rows[0].dtype, on_gpu)

    def perform(engine: Engine) -> Any:
        count, rest, place, dtype, on_gpu = broadcast_pickle(
            engine, partial(look, engine) if on_root else None, root
        )
        counts = split_lengths(count, engine.size)
        lengths = (counts * int(np.prod(rest, dtype=np.int64))).tolist()
        total = sum(lengths)
        if on_root:
            whole = rows[0].flat
        elif on_gpu and engine.devices is not None and not engine.devices.over_host:
            whole = engine.devices.room(total, dtype)
        else:
            whole = engine.work(total, dtype)
        engine.run("scatter", None, whole, lengths=lengths, root=root, algorithm=algorithm)
        block = engine.own_part(whole, lengths).copy()
        shaped = block.reshape(counts[engine.rank], *rest)
        return like(array)(packed(np.moveaxis(shaped, 0, place)))

    return Operation(Signature("scatter", root=root, detail=forced(algorithm)), perform)
