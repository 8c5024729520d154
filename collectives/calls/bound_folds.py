"""The bound reduce, scan and exscan: small arrays take one step, others what `Engine.run` chooses.

The memory of a rank that gets no result is needed by larger arrays alone, within the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.calls.bound import bind, of_shape
from collectives.calls.bound_small import small_fold, small_reduction
from collectives.calls.scans import identity, prefix
from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp

_WHOLE = slice(None)


def bind_reduce(
    engine: Engine,
    signature: Signature,
    op: ReduceOp,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    root: int,
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → the reduction on the root, None elsewhere."""
    count, gets = math.prod(shape), engine.rank == root
    small = small_reduction(engine, op, dtype, count * dtype.itemsize)
    if small is not None:
        ranks = range(engine.size if gets else 0)
        call = bind(engine, signature, *small_fold(engine, small, count, ranks, _WHOLE))
        return of_shape(call, shape, dtype, gets=gets)

    def run(source: Array | None, target: Array | None, index: int | None) -> None:
        into = engine.work(count, dtype) if target is None else target
        engine.run("reduce", source, into, op=op, root=root)

    return of_shape(bind(engine, signature, run), shape, dtype, gets=gets)


def bind_scan(
    engine: Engine, signature: Signature, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → the reduction of the ranks up to this one, or below it."""
    count, collective = math.prod(shape), signature.collective
    small = small_reduction(engine, op, dtype, count * dtype.itemsize)
    if small is None:

        def run(source: Array | None, target: Array, index: int | None) -> None:
            target[...] = prefix(engine, collective, target if source is None else source, op)

        return of_shape(bind(engine, signature, run), shape, dtype)
    ranks = range(engine.rank + (collective == "scan"))
    fold, publish = small_fold(engine, small, count, ranks, _WHOLE)
    nothing = identity(op, dtype)

    def fill(source: Any, target: Array, index: Any) -> None:
        target[...] = nothing

    return of_shape(bind(engine, signature, fold if ranks else fill, publish), shape, dtype)
