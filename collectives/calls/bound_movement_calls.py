"""The bound calls that move arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np

from collectives.arrays.kinds import is_device, like, to_array
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.caching import LRU
from collectives.calls import PASS
from collectives.calls.all_to_all import Parts, store
from collectives.calls.arguments import Rows, contiguous_apart, stores_rows
from collectives.calls.bound import bind_broadcast
from collectives.calls.bound_all_gather import bind_all_gather, bind_gather
from collectives.calls.bound_all_to_all import bind_all_to_all, bind_differing
from collectives.calls.bound_calls import Bound, BoundCalls, as_tensor
from collectives.calls.bound_from_root import Sent, bind_broadcast_object, bind_scatter
from collectives.calls.counts import ANY_ROOM
from collectives.calls.movements import (
    Scattered,
    broadcast_output,
    broadcast_signature,
    look_at,
    rows_of,
    signature_of,
)
from collectives.calls.objects import outcome_of
from collectives.cuda.runtime import on_gpu
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array


class BoundMovementCalls(BoundCalls):
    """broadcast, all_gather, gather, scatter, all_to_all, broadcast_object."""

    def __init__(self, engine: Engine, check_open: Callable[[], None]) -> None:
        super().__init__(engine, check_open)
        self._scattered: LRU[Scattered, bytes] = LRU()
        """Pickled, because programs scatter arrays of few kinds."""

    def broadcast(self, array: Any, root: int) -> Any:
        """As `Communicator.broadcast`."""
        if type(array) is np.ndarray and array.flags.carray:
            if ("broadcast", None, array.dtype, array.shape, root) not in self.known:
                to_array(array)  # refuses dtypes that can't be sent
            self._broadcast(array, root, array.reshape(-1))
            return array
        if (views := self._tensors.views(array, array)) is not None:
            self.broadcast(views[0], root)
            return array
        if on_gpu(array):
            return self._on_gpu("broadcast", array, array, root=root)
        given = to_array(array)
        output = broadcast_output(given, array, on_root=self._engine.rank == root)

        def perform() -> Any:
            self._broadcast(given, root, output.buffer)
            return output.deliver()

        return self._engine.whole(perform)

    def _broadcast(self, array: Array, root: int, buffer: Array) -> None:
        def bind() -> Bound:
            signature = broadcast_signature(array, root, None)
            return bind_broadcast(self._engine, signature, array.nbytes, root)

        key = "broadcast", None, array.dtype, array.shape, root
        self._call(key, bind, None, buffer.view(np.uint8))

    def all_gather(self, array: Any, axis: Any, out: Any) -> Any:
        """As `Communicator.all_gather`."""
        zero = type(axis) is int and axis == 0
        if type(array) is np.ndarray and array.ndim and zero and stores_rows(out, array):
            rest, room = array.shape[1:], ANY_ROOM if out is None else len(out)
            target = None if out is None else out.reshape(-1)
            joined = self._all_gather(array, rest, room, contiguous_apart(array, target), target)
            return joined if out is None else out
        if (views := self._tensors.views(array, out)) is not None:
            if out is None:
                return self._engine.whole(as_tensor, self.all_gather, views[0], axis, None)
            self.all_gather(views[0], axis, views[1])
            return out
        if on_gpu(array):
            return self._on_gpu("all_gather", array, out, axis=axis)
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

    def gather(self, array: Any, root: int, axis: Any, out: Any) -> Any:
        """As `Communicator.gather`."""
        if root != self._engine.rank:
            out = None
        zero = type(axis) is int and axis == 0
        if type(array) is np.ndarray and array.ndim and zero and stores_rows(out, array):
            room = ANY_ROOM if out is None else len(out)
            target = None if out is None else out.reshape(-1)
            source = contiguous_apart(array, None)
            joined = self._gather(source, array.shape, room, target, root)
            return joined if out is None else out
        if (views := self._tensors.views(array, out)) is not None:
            if out is None:
                return self._engine.whole(as_tensor, self.gather, views[0], root, axis, None)
            self.gather(views[0], root, axis, views[1])
            return out
        if on_gpu(array):
            return PASS
        rows = Rows(to_array(array), axis)
        refuse_lost_gradient(array, "array")
        room = ANY_ROOM if out is None else rows_of(out, rows)

        def perform() -> Any:
            shape = rows.count, *rows.rest
            joined = self._gather(rows.flat, shape, room, None, root, rows)
            if joined is None:
                return None
            if out is None:
                return like(array)(rows.array(joined, len(joined)))
            output = rows.output(out, len(joined), rows.dtype, array)
            output.buffer[...] = joined.reshape(-1)
            return output.deliver()

        return self._engine.whole(perform)

    def _gather(
        self,
        source: Array,
        shape: tuple[int, ...],
        room: int,
        target: Array | None,
        root: int,
        rows: Rows | None = None,
    ) -> Any:
        """`shape` is that of this rank's rows, which come first in it."""

        def bind() -> Bound:
            seen = rows or Rows(to_array(source.reshape(shape)), 0)
            signature = signature_of("gather", seen, root, None)
            count, rest, dtype = seen.count, seen.rest, seen.dtype
            return bind_gather(self._engine, signature, count, room, rest, dtype, root)

        axis = 0 if rows is None else rows.axis
        return self._call(("gather", source.dtype, shape, axis, room, root), bind, source, target)

    def scatter(self, array: Any, root: int, axis: int, out: Any) -> Any:
        """As `Communicator.scatter`."""
        return self._engine.whole(self._scatter, array, root, axis, out)

    def _scatter(self, array: Any, root: int, axis: int, out: Any) -> Any:
        engine, flat, sent = self._engine, None, None
        if engine.rank == root:
            sent, flat = self._sent(array, axis)
        bind = partial(bind_scatter, engine, root)
        return self._call(("scatter", root), bind, sent, (array, flat, out))

    def _sent(self, array: Any, axis: int) -> tuple[Sent, Array | None]:
        """What the root of a scatter sends, and its elements; the error if there are none."""
        try:
            found, rows = look_at(self._engine, array, axis)
        except Exception as error:
            return Sent(outcome_of(partial(_raise, error))), None
        pickled = self._scattered.recall(found)
        if pickled is None:
            pickled = self._scattered.put(found, outcome_of(lambda: found))
        if is_device(rows.flat):
            return Sent(pickled, ANY_ROOM), rows.flat
        return Sent(pickled, rows.flat.nbytes, rows.flat), rows.flat

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """As `Communicator.broadcast_object`."""
        bind = partial(bind_broadcast_object, self._engine, root)
        sent = Sent(outcome_of(lambda: obj)) if self._engine.rank == root else None
        return self._call(("broadcast_object", root), bind, sent, None)

    def all_to_all(self, arrays: Any, out: Any) -> Any:
        """As `Communicator.all_to_all`."""
        size, plain = self._engine.size, type(arrays) is np.ndarray
        if not plain and (views := self._tensors.views(arrays, out)) is not None:
            source, target = views
            if out is None:
                return self._engine.whole(as_tensor, self.all_to_all, source, None)
            # Not `*views`: a signal's handler may run after such a call has returned.
            self.all_to_all(source, target)
            return out
        divisible = plain and arrays.ndim and not len(arrays) % size
        if divisible and stores_rows(out, arrays) and (out is None or len(out) == len(arrays)):
            result = np.empty(arrays.shape, arrays.dtype) if out is None else out
            target, shape = result.reshape(-1), (len(arrays) // size, *arrays.shape[1:])
            differing = self._all_to_all(contiguous_apart(arrays, target), target, shape)
            if differing is None:
                return result
            # After the call: `whole` around all of it would cost every call time.
            try:
                store(differing, list(result.reshape(size, *shape)))
            except BaseException as error:
                self._engine.leave(error)
                raise
            return result
        if on_gpu(arrays):
            return PASS
        if not hasattr(arrays, "shape") and any(map(on_gpu, arrays)):
            return PASS
        return self._engine.whole(self._all_to_all_parts, Parts(arrays, size, out))

    def _all_to_all_parts(self, parts: Parts) -> Any:
        arrays, first = parts.arrays, parts.arrays[0]
        if parts.alike:
            # In the dtype that other ranks send, also where NumPy would choose another.
            source = np.concatenate([array.reshape(-1) for array in arrays], dtype=first.dtype)
            target = np.empty((len(arrays), *first.shape), first.dtype)
            differing = self._all_to_all(source, target.reshape(-1), first.shape)
            return parts.deliver(differing or [target[peer, ...] for peer in range(len(arrays))])
        bind = partial(bind_differing, self._engine, parts.nbytes)
        return parts.deliver(self._call(("all_to_all", parts.nbytes), bind, arrays, None))

    def _all_to_all(self, source: Array, target: Array, shape: tuple[int, ...]) -> Any:
        """None, or the received arrays where the target does not hold them."""
        bind = partial(bind_all_to_all, self._engine, shape, source.dtype)
        return self._call(("all_to_all", None, source.dtype, shape, None), bind, source, target)


def _raise(error: Exception) -> NoReturn:
    raise error
