"""The calls that reduce arrays: their arguments are checked, and the operation is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from collectives import algorithms
from collectives.arrays.kinds import Output, after_reading, copied, empty, may_overlap
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.bound.calls import Bound, bound_operation, operation_on_gpu
from collectives.bound.folds import bind_all_reduce, bind_reduce, bind_reduce_scatter, bind_scan
from collectives.calls import Operation
from collectives.calls.arguments import Rows, split_rows
from collectives.calls.reductions import ReduceInput, reduce_scatter_signature
from collectives.calls.scans import prefix, refuse_mean
from collectives.consistency.signature import Signature, check_index, check_text, detail_of
from collectives.cuda.runtime import fetched, filled
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, reduction_for

Bind = Callable[..., Bound]
"""A function (engine, signature, op, dtype, shape, algorithm) that binds a call."""


def all_reduce(
    engine: Engine,
    array: Any,
    op: ReduceOp | str = "sum",
    *,
    out: Any = None,
    algorithm: str | None = None,
    what: str | None = None,
) -> Operation:
    """The reduction of all ranks' arrays, on every rank."""
    detail = algorithms.forced("all_reduce", algorithm)
    check_text(what)
    given = ReduceInput(array, op)
    signature = given.signature("all_reduce", detail=detail_of(detail, what))
    key = key_of(given.array, op, what)
    return _reduction(bind_all_reduce, signature, key, given, given.output(out), algorithm)


def reduce(
    engine: Engine,
    array: Any,
    op: ReduceOp | str = "sum",
    *,
    root: int = 0,
    out: Any = None,
    algorithm: str | None = None,
) -> Operation:
    """The reduction of all ranks' arrays, on the root alone; None elsewhere."""
    root = check_index("root", root, engine.size)
    detail = algorithms.forced("reduce", algorithm)
    # On every rank alike, though the root alone gets a result.
    refuse_lost_gradient(array, "array")
    given = ReduceInput(array, op)
    output = given.output(out) if engine.rank == root else None
    signature = given.signature("reduce", root, detail)
    key = "reduce", op, given.array.dtype, given.shape, root
    return _reduction(bind_reduce, signature, key, given, output, algorithm)


def _reduction(
    bind: Bind,
    signature: Signature,
    key: tuple[Any, ...],
    given: ReduceInput,
    output: Output | None,
    algorithm: str | None,
) -> Operation:
    """The reduction of arrays to one of their shape, which this rank gets if it has an output."""
    if output is None:
        source: Array | None = given.flat()
        target = empty(given.array.size, given.dtype, given.array) if given.on_gpu else None
    else:
        source, target = given.source_for(output), output.buffer

    def deliver(result: Any = None) -> Any:
        if output is not None:
            return output.deliver()
        after_reading(given.original)
        return None

    if given.on_gpu:
        how = {"op": given.op, "root": signature.root or 0, "algorithm": algorithm}
        return operation_on_gpu(signature, source, target, deliver, **how)
    kind = {"op": given.op, "dtype": given.dtype, "shape": given.shape}
    binder = partial(bind, signature=signature, algorithm=algorithm, **kind)
    shaped = None if target is None else target.reshape(given.shape)
    array = shaped if source is None else source.reshape(given.shape)
    return bound_operation(signature, key, binder, array, shaped, deliver, algorithm)


def reduce_scatter(
    engine: Engine,
    array: Any,
    op: ReduceOp | str = "sum",
    *,
    axis: int = 0,
    out: Any = None,
    algorithm: str | None = None,
) -> Operation:
    """Rank r's block, of `numpy.array_split` along the axis, of the reduction."""
    detail = algorithms.forced("reduce_scatter", algorithm)
    given = ReduceInput(array, op)
    if out is None:
        refuse_lost_gradient(array, "array")
    rows = Rows(given.converted(), axis)
    counts = split_rows(rows.count, engine.size)
    own = counts[engine.rank]
    output = rows.output(out, own, given.dtype, given.original)
    source, shape = rows.flat, (rows.count, *rows.rest)
    if out is not None and may_overlap(source, output.buffer):
        source = copied(source)
    signature = reduce_scatter_signature(given, rows.axis, detail)
    if given.on_gpu:
        how = {"op": given.op, "algorithm": algorithm}
        lengths = tuple(count * rows.elements for count in counts)
        return operation_on_gpu(
            signature, source, output.buffer, output.deliver, lengths=lengths, **how
        )
    bind = partial(
        bind_reduce_scatter,
        signature=signature,
        op=given.op,
        dtype=given.dtype,
        shape=shape,
        counts=counts,
        algorithm=algorithm,
    )
    key = "reduce_scatter", op, given.array.dtype, given.shape, rows.axis
    part = output.buffer.reshape(own, *rows.rest)
    return bound_operation(
        signature, key, bind, source.reshape(shape), part, lambda _: output.deliver(), algorithm
    )


def scan(
    engine: Engine,
    array: Any,
    op: ReduceOp | str = "sum",
    *,
    out: Any = None,
    algorithm: str | None = None,
) -> Operation:
    """The reduction of the arrays of all ranks up to this one."""
    return _scan("scan", array, op, out, algorithm)


def exscan(
    engine: Engine,
    array: Any,
    op: ReduceOp | str = "sum",
    *,
    out: Any = None,
    algorithm: str | None = None,
) -> Operation:
    """The reduction of the arrays of all ranks below this one."""
    return _scan("exscan", array, op, out, algorithm)


def _scan(
    collective: str, array: Any, op: ReduceOp | str, out: Any, algorithm: str | None
) -> Operation:
    """Device arrays are staged through the host."""
    detail = algorithms.forced(collective, algorithm)
    given = ReduceInput(array, op)
    refuse_mean(collective, given.op)
    reduction_for(given.op, given.dtype)  # as on the CPU
    output = given.output(out)
    signature = given.signature(collective, detail=detail)

    def run_on_gpu(engine: Engine) -> Any:
        filled(
            output.buffer, prefix(engine, collective, fetched(given.flat()), given.op, algorithm)
        )
        return output.deliver()

    if given.on_gpu:
        return Operation(signature, run_on_gpu, on_gpu=True)
    key = collective, op, given.array.dtype, given.shape, None
    return _reduction(bind_scan, signature, key, given, output, algorithm)


def key_of(array: Array, op: ReduceOp | str, what: str | None) -> tuple[Any, ...]:
    """Of an all_reduce."""
    key = op, array.dtype, array.shape
    return key if what is None else (*key, what)
