"""The bound all_reduce, broadcast and reduce_scatter, over the path that their size chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.calls import PASS
from collectives.calls.bound import Call, Run, bind
from collectives.calls.bound_between_nodes import ReductionExchange, exchanged_reduction
from collectives.calls.bound_small import bind_small, small_broadcast, small_fold, small_reduction
from collectives.calls.exchanged_rows import ExchangedRows, room_of_row
from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, reduction_for
from collectives.shm.addresses import Publish
from collectives.shm.selector import PathSelector

_BYTES = np.dtype(np.uint8)


def bind_all_reduce(
    engine: Engine, signature: Signature, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Callable[[Array, Any], Any]:
    """The function (array, out) → result; `dtype` is that of the fold.

    `array` is any NumPy array of the shape whose elements are converted to the dtype. PASS where
    `out` can't take the result as it comes.
    """
    count = int(np.prod(shape, dtype=np.int64))
    small = small_reduction(engine, op, dtype, count * dtype.itemsize)
    if small is not None:
        return bind_small(engine, signature, small, shape)
    exchanged = exchanged_reduction(engine, "all_reduce", op, dtype, count * dtype.itemsize)
    if exchanged is not None:
        exchange = ReductionExchange(engine, exchanged, count)
        call = bind(engine, signature, exchange.deliver, exchange=exchange)
        return of_shape(call, shape, dtype)
    run, publish = _component(engine, "all_reduce", op, dtype, count * dtype.itemsize)
    return of_shape(bind(engine, signature, run, publish), shape, dtype)


def of_shape(
    call: Call, shape: tuple[int, ...], dtype: np.dtype[Any], *, gets: bool = True
) -> Callable[[Array, Any], Any]:
    """As a bound call of flat buffers: the function (array, out) → result of that shape and dtype.

    `array` is any NumPy array of the shape. PASS where `out` can't take the result as it comes. A
    rank that doesn't get the result returns None.
    """
    ndarray, empty, overlap, flat = np.ndarray, np.empty, np.may_share_memory, len(shape) == 1

    def call_with(array: Array, out: Any) -> Any:
        flags = array.flags
        source: Array | None
        if array.dtype == dtype and flags.c_contiguous and flags.aligned:
            source = array if flat else array.reshape(-1)
        else:
            source = array.astype(dtype, order="C").reshape(-1)
        if not gets:
            return PASS if call(source, None) is PASS else None
        if out is None:
            out = empty(shape, dtype)
        elif type(out) is not ndarray or not out.flags.carray:
            return PASS
        elif out is array:
            source = None
        elif (
            out.shape != shape
            or out.dtype != dtype
            or ((out.base is not None or array.base is not None) and overlap(array, out))
        ):
            return PASS
        return PASS if call(source, out if flat else out.reshape(-1)) is PASS else out

    return call_with


def bind_broadcast(
    engine: Engine, signature: Signature, nbytes: int, root: int
) -> Callable[[Any, Array], Any]:
    """The function (None, buffer): the root's content in every rank's buffer of bytes."""
    most, on_root = room_of_row(engine, 1), engine.rank == root
    if 0 < nbytes <= most:
        rows = ExchangedRows(engine, most, nbytes=nbytes if on_root else 0)

        def take(source: None, target: Array, index: int | None) -> None:
            if not on_root:
                target[...] = rows.joined()[:nbytes]

        return bind(engine, signature, take, exchange=rows)
    small = small_broadcast(engine, nbytes, root)
    run, publish = small or _component(engine, "broadcast", None, _BYTES, nbytes, (), root)
    return bind(engine, signature, run, publish)


def bind_reduce_scatter(
    engine: Engine, signature: Signature, op: ReduceOp, dtype: np.dtype[Any], lengths: Sequence[int]
) -> Callable[[Array, Array], Any]:
    """The function (source, target): `target` is this rank's part, `lengths` those of all."""
    nbytes = sum(lengths) * dtype.itemsize
    small = small_reduction(engine, op, dtype, nbytes)
    stop = sum(lengths[: engine.rank + 1])
    part = slice(stop - lengths[engine.rank], stop)
    if small is not None:
        every = range(engine.size)
        return bind(engine, signature, *small_fold(engine, small, sum(lengths), every, part))
    exchanged = exchanged_reduction(engine, "reduce_scatter", op, dtype, nbytes)
    if exchanged is not None:
        exchange = ReductionExchange(engine, exchanged, sum(lengths), part)
        return bind(engine, signature, exchange.deliver, exchange=exchange)
    run, publish = _component(engine, "reduce_scatter", op, dtype, nbytes, lengths)
    return bind(engine, signature, run, publish)


def _component(
    engine: Engine,
    collective: str,
    op: ReduceOp | None,
    dtype: np.dtype[Any],
    nbytes: int,
    lengths: Sequence[int] = (),
    root: int = 0,
) -> tuple[Run, Publish | None]:
    """What moves and folds the data of a collective of so many bytes, and what it publishes."""
    paths, errstate = engine.paths(collective, op, dtype), engine.errstate.run
    name = engine.choose(collective, nbytes, paths) if engine.size > 1 else ""
    path = paths.get(name)

    if path is None:

        def run(source: Array | None, target: Array, index: int | None) -> None:
            engine.run(collective, source, target, lengths=lengths or None, op=op, root=root)

        return run, None

    if engine.node is None or not isinstance(path, PathSelector) or not path.exchanges(nbytes):

        def run_path(source: Array | None, target: Array, index: int | None) -> None:
            engine.path = errstate(path, source, target, lengths, root) or name

        return _finished(engine, op, dtype, run_path), None

    read, select = engine.node.addresses.read, path.run

    def run_selected(source: Array | None, target: Array, index: int | None) -> None:
        assert index is not None
        addresses, _, _ = read(index)
        engine.path = errstate(select, addresses, nbytes, source, target, lengths, root)

    publish = engine.node.addresses.publisher(nbytes)
    return _finished(engine, op, dtype, run_selected), publish


def _finished(engine: Engine, op: ReduceOp | None, dtype: np.dtype[Any], run: Run) -> Run:
    """The same, at whose end the folded target becomes the result."""
    reduction = None if op is None else reduction_for(op, dtype)
    if reduction is None or not reduction.divides:
        return run
    size, errstate, finish = engine.size, engine.errstate.run, reduction.finish

    def run_and_finish(source: Array | None, target: Array, index: int | None) -> None:
        run(source, target, index)
        errstate(finish, target, size)

    return run_and_finish
