"""The bound reductions.

Small arrays take one step, others what `Engine.run` or the selector chooses; a forced algorithm
moves all data itself. The memory of a rank that gets no result is needed by larger arrays alone,
within the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.bound.between_nodes import (
    WHOLE,
    ReductionExchange,
    StagedExchange,
    exchanged_reduction,
    staged_reduction,
)
from collectives.bound.bind import bind, component, of_shape
from collectives.bound.exchanged import bind_exchanged
from collectives.bound.exchanged_rows import ExchangedRows, room_of_row
from collectives.bound.small import bind_small, fold_parts, small_fold, small_reduction
from collectives.calls.scans import identity, prefix
from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, reduction_for


def bind_all_reduce(
    engine: Engine,
    signature: Signature,
    op: ReduceOp,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    algorithm: str | None = None,
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → result; `dtype` is that of the fold.

    `array` is any NumPy array of the shape whose elements are converted to the dtype. PASS where
    `out` can't take the result as it comes.
    """
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if algorithm is None:
        small = small_reduction(engine, op, dtype, nbytes)
        if small is not None:
            return bind_small(engine, signature, small, shape)
        exchanged = exchanged_reduction(engine, "all_reduce", op, dtype, nbytes)
        if exchanged is not None:
            return bind_exchanged(engine, signature, exchanged, shape)
        staged = staged_reduction(engine, op, dtype, nbytes)
        if staged is not None:
            exchange = StagedExchange(engine, staged, count)
            call = bind(engine, signature, exchange.deliver, exchange=exchange)
            return of_shape(call, shape, dtype)
    run, publish = component(engine, "all_reduce", op, dtype, nbytes, algorithm=algorithm)
    return of_shape(bind(engine, signature, run, publish), shape, dtype)


def bind_reduce(
    engine: Engine,
    signature: Signature,
    op: ReduceOp,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    algorithm: str | None = None,
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → the reduction on the root, None elsewhere."""
    count, root = math.prod(shape), signature.root or 0
    gets = engine.rank == root
    nbytes, forced = count * dtype.itemsize, algorithm is not None
    small = None if forced else small_reduction(engine, op, dtype, nbytes)
    if small is not None:
        ranks = range(engine.size if gets else 0)
        call = bind(engine, signature, *small_fold(engine, small, count, ranks, WHOLE))
        return of_shape(call, shape, dtype, gets=gets)
    exchanged = None if forced else exchanged_reduction(engine, "reduce", op, dtype, nbytes)
    if exchanged is not None:
        exchange = ReductionExchange(engine, exchanged, count)
        call = bind(engine, signature, exchange.deliver, exchange=exchange)
        return of_shape(call, shape, dtype, gets=gets)

    def run(source: Array | None, target: Array | None, index: int | None) -> None:
        into = engine.work(count, dtype) if target is None else target
        engine.run("reduce", source, into, op=op, root=root, algorithm=algorithm)

    return of_shape(bind(engine, signature, run), shape, dtype, gets=gets)


def bind_scan(
    engine: Engine,
    signature: Signature,
    op: ReduceOp,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    algorithm: str | None = None,
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → the reduction of the ranks up to this one, or below it."""
    count, collective = math.prod(shape), signature.collective
    nbytes, ranks = count * dtype.itemsize, range(engine.rank + (collective == "scan"))
    small = None if algorithm is not None else small_reduction(engine, op, dtype, nbytes)
    nothing = identity(op, dtype)

    def fill(source: Any, target: Array, index: Any) -> None:
        target[...] = nothing

    if small is not None:
        fold, publish = small_fold(engine, small, count, ranks, WHOLE)
        return of_shape(bind(engine, signature, fold if ranks else fill, publish), shape, dtype)
    reduction, most = reduction_for(op, dtype), room_of_row(engine, engine.size)
    fold_two, errstate = reduction.plain_fold, engine.errstate.run
    if algorithm is None and fold_two is not None and 0 < nbytes <= most:
        rows = ExchangedRows(engine, most, nbytes=nbytes)

        def fold_rows(source: Any, target: Array, index: Any) -> None:
            every = rows.joined()[: nbytes * engine.size].view(dtype).reshape(-1, count)
            errstate(fold_parts, fold_two, list(every[: len(ranks)]), target)

        call = bind(engine, signature, fold_rows if ranks else fill, exchange=rows)
        return of_shape(call, shape, dtype)

    def run(source: Array | None, target: Array, index: int | None) -> None:
        given = target if source is None else source
        target[...] = prefix(engine, collective, given, op, algorithm)

    return of_shape(bind(engine, signature, run), shape, dtype)


def bind_reduce_scatter(
    engine: Engine,
    signature: Signature,
    op: ReduceOp,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    counts: Sequence[int],
    algorithm: str | None = None,
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → this rank's part: rows of the array, `counts` those of all."""
    elements = math.prod(shape[1:])
    lengths, own = [count * elements for count in counts], (counts[engine.rank], *shape[1:])
    count, nbytes = sum(lengths), sum(lengths) * dtype.itemsize
    forced = algorithm is not None
    small = None if forced else small_reduction(engine, op, dtype, nbytes)
    stop = sum(lengths[: engine.rank + 1])
    part = slice(stop - lengths[engine.rank], stop)
    exchanged = None if forced else exchanged_reduction(engine, "reduce_scatter", op, dtype, nbytes)
    if small is not None:
        call = bind(engine, signature, *small_fold(engine, small, count, range(engine.size), part))
    elif exchanged is not None:
        exchange = ReductionExchange(engine, exchanged, count, part)
        call = bind(engine, signature, exchange.deliver, exchange=exchange)
    else:
        run, publish = component(
            engine, "reduce_scatter", op, dtype, nbytes, lengths, algorithm=algorithm
        )
        call = bind(engine, signature, run, publish)
    return of_shape(call, shape, dtype, part=own)
