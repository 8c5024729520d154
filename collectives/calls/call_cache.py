"""The bound calls of one communicator, by what was asked for.

Plain torch tensors are taken as their memory. Other arrays that a bound call can't take as they are
(of another library, strides or dtype than that of the fold) are brought into shape here, before the
same bound call: all ranks take the same path, whatever they give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.kinds import Output, like, may_overlap, to_array
from collectives.arrays.tensor_memory import TensorMemory
from collectives.arrays.tensors import refuse_lost_gradient, to_torch
from collectives.caching import LRU
from collectives.calls import PASS
from collectives.calls.all_to_all import Parts, store
from collectives.calls.arguments import Rows, contiguous_apart, split_rows, stores_rows
from collectives.calls.bound import (
    bind,
    bind_all_reduce,
    bind_broadcast,
    bind_reduce_scatter,
)
from collectives.calls.bound_all_gather import bind_all_gather
from collectives.calls.bound_all_to_all import bind_all_to_all, bind_differing
from collectives.calls.counts import ANY_ROOM
from collectives.calls.movements import broadcast_output, broadcast_signature, rows_of, signature_of
from collectives.calls.reductions import ReduceInput, reduce_scatter_signature
from collectives.consistency.signature import Signature
from collectives.cuda.runtime import cuda, on_gpu
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, as_op, reduction_for

Bound = Callable[..., Any]

_BARRIERS_SEEN = 64


class CallCache:
    """Bound calls. Each method returns PASS for arrays on GPUs, before it did anything."""

    def __init__(self, engine: Engine, check_open: Callable[[], None]) -> None:
        """`check_open` raises where no call can be made."""
        self._engine, self._check_open = engine, check_open
        self.known: LRU[Any, Bound] = LRU()
        """By (op, dtype, shape) those of `all_reduce`, by longer keys the others."""
        self._tensors = TensorMemory()
        self._barriers_seen: LRU[str | None, None] = LRU(_BARRIERS_SEEN)

    def _call(self, key: Any, bind: Callable[[], Bound], source: Any, target: Any) -> Any:
        """Make the call of that key, which is bound where it isn't yet."""
        for _ in range(2):
            bound = self.known.recall(key)
            if bound is None:
                self._check_open()
                bound = self.known.put(key, bind())
            result = bound(source, target)
            # Bound before another thread made the first registered array: once more.
            if result is not PASS:
                return result
            self.known.pop(key, None)
        raise AssertionError(f"{key}: no call was made")

    def all_reduce(self, array: Any, op: ReduceOp | str, out: Any, what: str | None) -> Any:
        """As `Communicator.all_reduce`."""
        if (views := self._tensors.views(array, out)) is not None:
            source, target = views
            known = what is None and type(op) is str
            bound = self.known.get((op, source.dtype, source.shape)) if known else None
            result: Any = PASS if bound is None else bound(source, target)
            if result is PASS:
                result = self.all_reduce(source, op, target, what)
            return to_torch(result) if out is None else out
        if on_gpu(array):
            return PASS if what is not None else self._all_reduce_on_gpu(array, op, out)
        given = ReduceInput(array, op)
        return self._engine.whole(self._all_reduce, given, op, given.output(out), what)

    def _all_reduce(
        self, given: ReduceInput, op: ReduceOp | str, output: Output, what: str | None
    ) -> Any:
        def bind() -> Bound:
            signature = given.signature("all_reduce", detail=what)
            return bind_all_reduce(self._engine, signature, given.op, given.dtype, given.shape)

        source, target = given.source_for(output), output.buffer.reshape(given.shape)
        key = op, given.array.dtype, given.shape
        shaped = target if source is None else source.reshape(given.shape)
        self._call(key if what is None else (*key, what), bind, shaped, target)
        return output.deliver()

    def barrier(self, what: str | None) -> Any:
        """As `Communicator.barrier`; bound where a text recurs, since many texts never do."""
        key = "barrier", what
        if key not in self.known:
            if not (what is None or type(what) is str):
                return PASS
            if what not in self._barriers_seen:
                self._barriers_seen.put(what, None)
                return PASS
        signature = Signature("barrier", detail=what)
        return self._call(key, lambda: bind(self._engine, signature, _nothing), None, None)

    def _all_reduce_on_gpu(self, array: Any, op: ReduceOp | str, out: Any) -> Any:
        """As `all_reduce`; the first call of a kind isn't bound: in it all ranks choose a path."""
        known_kind = type(array) is cuda().array_type and isinstance(op, str | ReduceOp)
        if not known_kind or self._engine.devices is None:
            return PASS
        key = ("on a GPU", op, array.dtype, array.shape)
        bound = self.known.get(key)
        if bound is not None:
            return bound(array, out)
        bound = self._engine.devices.bind_all_reduce(ReduceInput(array, op))
        if bound is not None:
            self.known.put(key, bound)
        return PASS

    def broadcast(self, array: Any, root: int, *, on_root: bool) -> Any:
        """As `Communicator.broadcast`."""
        if type(array) is np.ndarray and array.flags.carray:
            if ("broadcast", array.dtype, array.shape, root) not in self.known:
                to_array(array)  # refuses dtypes that can't be sent
            self._broadcast(array, root, array.reshape(-1))
            return array
        if (views := self._tensors.views(array, array)) is not None:
            self.broadcast(views[0], root, on_root=on_root)
            return array
        if on_gpu(array):
            return PASS
        given = to_array(array)
        output = broadcast_output(given, array, on_root=on_root)

        def perform() -> Any:
            self._broadcast(given, root, output.buffer)
            return output.deliver()

        return self._engine.whole(perform)

    def _broadcast(self, array: Array, root: int, buffer: Array) -> None:
        def bind() -> Bound:
            signature = broadcast_signature(array, root, None)
            return bind_broadcast(self._engine, signature, array.nbytes, root)

        self._call(("broadcast", array.dtype, array.shape, root), bind, None, buffer.view(np.uint8))

    def all_gather(self, array: Any, axis: Any, out: Any) -> Any:
        """As `Communicator.all_gather`."""
        zero = type(axis) is int and axis == 0
        if type(array) is np.ndarray and array.ndim and zero and stores_rows(out, array):
            rest, room = array.shape[1:], ANY_ROOM if out is None else len(out)
            target = None if out is None else out.reshape(-1)
            joined = self._all_gather(array, rest, room, contiguous_apart(array, target), target)
            return joined if out is None else out
        if (views := self._tensors.views(array, out)) is not None:
            result = self.all_gather(views[0], axis, views[1])
            return to_torch(result) if out is None else out
        if on_gpu(array):
            return PASS
        rows = Rows(to_array(array), axis)
        if out is None:
            refuse_lost_gradient(array, "array")
        room = ANY_ROOM if out is None else rows_of(out, rows)

        def perform() -> Any:
            joined = self._all_gather(array, rows.rest, room, rows.flat, None, rows)
            if out is None:
                return like(array)(rows.array(joined, len(joined)))
            output = rows.output(out, len(joined), rows.dtype, array)
            output.buffer[...] = joined.reshape(-1)
            return output.deliver()

        return self._engine.whole(perform)

    def _all_gather(
        self,
        array: Any,
        rest: tuple[int, ...],
        room: int,
        source: Array,
        target: Array | None,
        rows: Rows | None = None,
    ) -> Array:
        def bind() -> Bound:
            seen = rows or Rows(to_array(array), 0)
            signature = signature_of("all_gather", seen, None, None)
            return bind_all_gather(self._engine, signature, seen.count, room, seen.rest, seen.dtype)

        count, axis = (len(array), 0) if rows is None else (rows.count, rows.axis)
        key = "all_gather", source.dtype, rest, axis, count, room
        joined: Array = self._call(key, bind, source, target)
        return joined

    def reduce_scatter(self, array: Any, op: ReduceOp | str, axis: Any, out: Any) -> Any:
        """As `Communicator.reduce_scatter`."""
        if (views := self._tensors.views(array, out)) is not None:
            result = self.reduce_scatter(views[0], op, axis, views[1])
            return to_torch(result) if out is None else out
        if on_gpu(array):
            return PASS
        rank, size = self._engine.rank, self._engine.size
        zero = type(axis) is int and axis == 0
        plain = type(array) is np.ndarray and array.ndim and zero and array.dtype.isnative
        if (
            plain
            and stores_rows(out, array)
            and reduction_for(as_op(op), array.dtype).dtype == array.dtype
        ):
            counts, rest = split_rows(len(array), size), array.shape[1:]
            if out is None or len(out) == counts[rank]:
                result = np.empty((counts[rank], *rest), array.dtype) if out is None else out
                target = result.reshape(-1)
                source = contiguous_apart(array, target)
                self._reduce_scatter(op, source, target, array.shape, 0, counts, math.prod(rest))
                return result
        given = ReduceInput(array, op)
        if out is None:
            refuse_lost_gradient(array, "array")
        rows = Rows(given.converted(), axis)
        counts = split_rows(rows.count, size)
        output = rows.output(out, counts[rank], given.dtype, given.original)
        source, target = rows.flat, output.buffer
        if out is not None and may_overlap(source, target):
            source = source.copy()

        def perform() -> Any:
            shape, elements = given.shape, rows.elements
            self._reduce_scatter(op, source, target, shape, rows.axis, counts, elements, given)
            return output.deliver()

        return self._engine.whole(perform)

    def _reduce_scatter(
        self,
        op: ReduceOp | str,
        source: Array,
        target: Array,
        shape: tuple[int, ...],
        axis: int,
        counts: Sequence[int],
        elements: int,
        given: ReduceInput | None = None,
    ) -> None:
        def bind() -> Bound:
            seen = given or ReduceInput(source.reshape(shape), op)
            signature = reduce_scatter_signature(seen, axis, None)
            lengths = [count * elements for count in counts]
            return bind_reduce_scatter(self._engine, signature, seen.op, seen.dtype, lengths)

        dtype = source.dtype if given is None else given.array.dtype
        self._call(("reduce_scatter", op, dtype, shape, axis), bind, source, target)

    def all_to_all(self, arrays: Any, out: Any) -> Any:
        """As `Communicator.all_to_all`."""
        size, plain = self._engine.size, type(arrays) is np.ndarray
        if not plain and (views := self._tensors.views(arrays, out)) is not None:
            result = self.all_to_all(*views)
            return to_torch(result) if out is None else out
        divisible = plain and arrays.ndim and not len(arrays) % size
        if divisible and stores_rows(out, arrays) and (out is None or len(out) == len(arrays)):
            result = np.empty(arrays.shape, arrays.dtype) if out is None else out
            target, shape = result.reshape(-1), (len(arrays) // size, *arrays.shape[1:])
            differing = self._all_to_all(contiguous_apart(arrays, target), target, shape)
            if differing is not None:
                store(differing, list(result.reshape(size, *shape)))
            return result
        if on_gpu(arrays) or (not hasattr(arrays, "shape") and any(map(on_gpu, arrays))):
            return PASS
        return self._engine.whole(self._all_to_all_parts, Parts(arrays, size, out))

    def _all_to_all_parts(self, parts: Parts) -> Any:
        arrays, first = parts.arrays, parts.arrays[0]
        if parts.alike:
            source = np.concatenate([array.reshape(-1) for array in arrays])
            target = np.empty((len(arrays), *first.shape), first.dtype)
            differing = self._all_to_all(source, target.reshape(-1), first.shape)
            return parts.deliver(differing or [target[peer, ...] for peer in range(len(arrays))])
        bind = partial(bind_differing, self._engine, parts.nbytes)
        return parts.deliver(self._call(("all_to_all", parts.nbytes), bind, arrays, None))

    def _all_to_all(self, source: Array, target: Array, shape: tuple[int, ...]) -> Any:
        """None, or the received arrays where the target does not hold them."""
        bind = partial(bind_all_to_all, self._engine, shape, source.dtype)
        return self._call(("all_to_all", source.dtype, shape), bind, source, target)


def _nothing(source: None, target: None, index: int | None) -> None:
    """Move no data."""
