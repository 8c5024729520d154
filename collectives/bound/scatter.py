"""The bound scatter: few bytes travel with the check of the call, as the address of more does.

Not those that a forced algorithm moves.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NoReturn

import numpy as np

from collectives import algorithms
from collectives.arrays.kinds import is_device
from collectives.bound.bind import Call
from collectives.bound.calls import as_it_is, bound_operation
from collectives.bound.from_root import Sent, bind_from_root
from collectives.bound.small import node_of_all
from collectives.caching import LRU
from collectives.calls import Operation
from collectives.calls.arguments import axis_of, split_rows
from collectives.calls.counts import ANY_ROOM
from collectives.calls.movements import Scattered, look_at, scattered
from collectives.calls.objects import outcome_of, result_of
from collectives.consistency.signature import Signature, check_index, detail_of
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.shm.selector import PathSelector

_BYTES = np.dtype(np.uint8)


def bind_scatter(engine: Engine, signature: Signature, algorithm: str | None) -> Call:
    """The function (array, (axis, out)) → this rank's block, in `out` unless it is None."""
    known: LRU[bytes, _Block] = LRU()
    kinds: LRU[tuple[Any, ...], _Kind] = LRU()
    root = signature.root or 0
    on_root = engine.rank == root

    def sent_of(array: Any, axis: Any) -> tuple[Sent, Array | None]:
        """What the root sends, and its elements; the error if there are none."""
        plain = type(array) is np.ndarray and type(axis) is int and axis == 0 and not algorithm
        if plain and array.flags.carray:
            kind = kinds.get((array.dtype, array.shape))
            if kind is not None:
                flat = array.reshape(-1)
                return kind.sent(flat), flat
        try:
            found, rows = look_at(engine, array, axis)
        except Exception as error:
            return Sent(outcome_of(partial(_raise, error))), None
        kind = _Kind(found, engine.size, root)
        if plain:
            kinds.put((array.dtype, array.shape), kind)
        if algorithm is not None or is_device(rows.flat):
            return Sent(kind.pickled, ANY_ROOM), rows.flat
        return kind.sent(rows.flat), rows.flat

    def read(engine: Engine, pickled: Array) -> _Block:
        content = pickled.tobytes()
        return known.get(content) or known.put(
            content, _Block(engine, result_of(engine, pickled), root, algorithm)
        )

    def receive(
        block: _Block, data: Array | None, source: tuple[Any, Array | None, Any], index: Any
    ) -> Any:
        array, flat, out = source
        if data is not None:
            return block.deliver(data, flat, array, out)
        return block.move(flat, array, out, index)

    call = bind_from_root(engine, signature, root, receive, read)

    def scatter(array: Any, given: tuple[Any, Any]) -> Any:
        axis, out = given
        sent, flat = sent_of(array, axis) if on_root else (None, None)
        return call(sent, (array, flat, out))

    return scatter


def _raise(error: Exception) -> NoReturn:
    raise error


def bytes_sent(engine: Engine, nbytes: int, dtype: np.dtype[Any]) -> int:
    """How many bytes rank 0 sends of an array of one axis: its kind, and the others' elements."""
    found = Scattered(nbytes // max(dtype.itemsize, 1), (), 0, dtype, False)
    kind = _Kind(found, engine.size, 0)
    return len(kind.pickled) + kind.nbytes


class _Kind:
    """What the root sends of arrays of one kind: all elements but those of its own block."""

    def __init__(self, found: Scattered, size: int, root: int) -> None:
        self.pickled, lengths = outcome_of(lambda: found), found.lengths(size)
        start, stop = sum(lengths[:root]), sum(lengths[: root + 1])
        self.nbytes = (sum(lengths) - (stop - start)) * found.dtype.itemsize
        self._pieces = [slice(start)] * (start > 0) + [slice(stop, None)] * (stop < sum(lengths))

    def sent(self, flat: Array) -> Sent:
        return Sent(self.pickled, self.nbytes, flat, [flat[piece] for piece in self._pieces])


class _Block:
    """This rank's part of arrays of one kind, whose bytes lie one behind the other."""

    def __init__(self, engine: Engine, found: Scattered, root: int, algorithm: str | None) -> None:
        rank, size, itemsize = engine.rank, engine.size, found.dtype.itemsize
        self._engine, self._found, self._root = engine, found, root
        self._algorithm = algorithm
        self._shape = split_rows(found.rows, size)[rank], *found.rest
        elements = found.lengths(size)
        self._lengths = [length * itemsize for length in elements]
        start, self._nbytes = sum(elements[:rank]), sum(self._lengths)
        self._own = slice(start, start + elements[rank])
        self._start_of_others = (start - (elements[root] if rank > root else 0)) * itemsize
        self._selector: PathSelector | None = None
        addressed = algorithm is None and not found.on_gpu
        if node_of_all(engine) is not None and size > 1 and addressed:
            paths = engine.paths("scatter", None, _BYTES)
            path = paths.get(engine.choose("scatter", self._nbytes, paths))
            if isinstance(path, PathSelector) and path.exchanges(self._nbytes):
                self._selector = path

    def deliver(self, data: Array, flat: Array | None, array: Any, out: Any) -> Any:
        """As `Scattered.deliver`, from the bytes of all but the root's block, and its elements."""
        block: Array
        if flat is None:
            block = np.ndarray(self._shape, self._found.dtype, data, self._start_of_others)
        else:
            block = flat[self._own].reshape(self._shape)
        result = self._result(array, out)
        if result is None:
            return self._found.deliver(self._engine, block, array, out)
        result[...] = block
        return result

    def move(self, flat: Array | None, array: Any, out: Any, index: Any) -> Any:
        """As `Scattered.deliver`, of the root's elements, which are `flat` there.

        The root's address is in the row at the index.
        """
        engine, found, lengths, root = self._engine, self._found, self._lengths, self._root
        if found.on_gpu or self._algorithm is not None:
            return scattered(engine, found, flat, root, self._algorithm, array, out)
        result, new = self._result(array, out), found.becomes_result(out)
        if result is not None and (flat is None or not np.may_share_memory(flat, result)):
            block = result.reshape(-1)
        else:
            length = math.prod(self._shape)
            block = np.empty(length, found.dtype) if new else engine.work(length, found.dtype)
            result = None
        source, target = None if flat is None else flat.view(_BYTES), block.view(_BYTES)
        if self._selector is None:
            engine.run("scatter", source, target, lengths=lengths, root=root)
        else:
            assert engine.node is not None
            addresses, _, _ = engine.node.addresses.read(index)
            run = partial(self._selector.run, addresses, self._nbytes)
            engine.path = engine.errstate.run(run, source, target, lengths, root)
        if result is not None:
            return result
        return found.deliver(engine, block, array, out, copies=not new)

    def _result(self, array: Any, out: Any) -> Array | None:
        """The result, if it can take the elements as they come: NumPy's arrays alone."""
        found, shape, dtype = self._found, self._shape, self._found.dtype
        if found.axis or found.on_gpu:
            return None
        if out is None:
            return np.empty(shape, dtype) if array is None or type(array) is np.ndarray else None
        fits = type(out) is np.ndarray and out.shape == shape and out.dtype == dtype
        return out if fits and out.flags.carray else None


def scatter(
    engine: Engine,
    array: Any,
    *,
    root: int = 0,
    axis: int = 0,
    out: Any = None,
    algorithm: str | None = None,
) -> Operation:
    """Rank r's block, of `numpy.array_split` along the axis, of the root's array."""
    root = check_index("root", root, engine.size)
    axis, named = axis_of(axis), algorithms.forced("scatter", algorithm)
    detail = detail_of(f"axis={axis}" if axis else None, named)
    signature = Signature("scatter", root=root, detail=detail)
    bind = partial(bind_scatter, signature=signature, algorithm=algorithm)
    key = "scatter", root, axis
    return bound_operation(signature, key, bind, array, (axis, out), as_it_is, algorithm)
