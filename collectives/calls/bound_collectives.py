"""The bound calls of each collective: which path moves the data, and what it publishes before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.caching import LRU
from collectives.calls.bound import PASS, Run, bind
from collectives.calls.bound_small import bind_small, small_fold
from collectives.calls.counts import check_room
from collectives.calls.objects import numbers_of_all
from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, finish
from collectives.shm.addresses import NOWHERE, Publish
from collectives.shm.node import Path
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
    fold = small_fold(engine, op, dtype, count * dtype.itemsize)
    if fold is not None:
        return bind_small(engine, signature, op, dtype, shape, fold)
    ndarray, empty, overlap = np.ndarray, np.empty, np.may_share_memory
    call = _bind_large(engine, signature, op, dtype, count)

    def all_reduce(array: Array, out: Any) -> Any:
        flags = array.flags
        source: Array | None
        if array.dtype == dtype and flags.c_contiguous and flags.aligned:
            source = array.reshape(-1)
        else:
            source = array.astype(dtype, order="C").reshape(-1)
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
        return PASS if call(source, out.reshape(-1)) is PASS else out

    return all_reduce


def _bind_large(
    engine: Engine, signature: Signature, op: ReduceOp, dtype: np.dtype[Any], count: int
) -> Callable[[Array | None, Array], Any]:
    run, publish = _component(engine, "all_reduce", op, dtype, count * dtype.itemsize)
    return bind(engine, signature, _finished(engine, op, run), publish)


def _finished(engine: Engine, op: ReduceOp, run: Run) -> Run:
    """The same, at whose end the folded target becomes the result."""
    if op is not ReduceOp.MEAN:
        return run
    size, errstate = engine.size, engine.errstate.run

    def run_and_finish(source: Array | None, target: Array, index: int | None) -> None:
        run(source, target, index)
        errstate(finish, op, target, size)

    return run_and_finish


def bind_broadcast(
    engine: Engine, signature: Signature, nbytes: int, root: int
) -> Callable[[Any, Array], Any]:
    """The function (None, buffer): the root's content in every rank's buffer of bytes."""
    run, publish = _component(engine, "broadcast", None, _BYTES, nbytes, (), root)
    return bind(engine, signature, run, publish)


def bind_reduce_scatter(
    engine: Engine, signature: Signature, op: ReduceOp, dtype: np.dtype[Any], lengths: Sequence[int]
) -> Callable[[Array, Array], Any]:
    """The function (source, target): `target` is this rank's part, `lengths` those of all."""
    nbytes = sum(lengths) * dtype.itemsize
    run, publish = _component(engine, "reduce_scatter", op, dtype, nbytes, lengths)
    return bind(engine, signature, _finished(engine, op, run), publish)


def bind_all_gather(
    engine: Engine, signature: Signature, count: int, room: int, row: int, dtype: np.dtype[Any]
) -> Callable[[Array, Array | None], Any]:
    """The function (source, target) → joined rows of `row` elements, flat.

    This rank gives `count` rows. Without a target memory is allocated; `room` is how many rows the
    target has, which ValueError on every rank is raised about where it isn't the sum of all.
    """
    exchange = None if engine.node is None else engine.node.addresses
    paths = engine.paths("all_gather", None, _BYTES)
    row_bytes, errstate = row * dtype.itemsize, engine.errstate.run
    chosen: LRU[int, tuple[str, Path | None, bool]] = LRU()

    def choose(total: int) -> tuple[str, Path | None, bool]:
        """The path of so many bytes, and whether it uses the exchanged addresses."""
        name = engine.choose("all_gather", total, paths) if engine.size > 1 else ""
        path = paths.get(name)
        return name, path, isinstance(path, PathSelector) and path.exchanges(total)

    def run(source: Array, target: Array | None, index: int | None) -> tuple[Array, int]:
        addresses = NOWHERE
        if index is None or exchange is None:
            counts, rooms = zip(*numbers_of_all(engine, count, room), strict=True)
        else:
            addresses, counts, rooms = exchange.read(index)
        check_room(counts, rooms)
        lengths = [each * row_bytes for each in counts]
        total = sum(lengths)
        if target is None:
            target = np.empty(sum(counts) * row, dtype)
        given, filled = source.view(_BYTES), target.view(_BYTES)
        name, path, addressed = chosen.get(total) or chosen.put(total, choose(total))
        if path is None:
            engine.run("all_gather", given, filled, lengths=lengths)
        elif addressed and index is not None and isinstance(path, PathSelector):
            engine.path = errstate(path.run, addresses, total, given, filled, lengths, 0)
        else:
            engine.path = errstate(path, given, filled, lengths, 0) or name
        return target, sum(counts)

    publish = None if exchange is None else exchange.publisher(count, room)
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

        return run_path, None

    read, select = engine.node.addresses.read, path.run

    def run_selected(source: Array | None, target: Array, index: int | None) -> None:
        assert index is not None
        addresses, _, _ = read(index)
        engine.path = errstate(select, addresses, nbytes, source, target, lengths, root)

    return run_selected, engine.node.addresses.publisher(nbytes)
