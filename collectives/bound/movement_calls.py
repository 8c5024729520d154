"""The bound calls that move arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np

from collectives.arrays.kinds import is_device, like, to_array
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.bound.all_gather import bind_all_gather
from collectives.bound.all_to_all import bind_all_to_all, bind_differing, bind_equal
from collectives.bound.broadcast import bind_broadcast
from collectives.bound.calls import Bound, BoundCalls, as_tensor
from collectives.bound.from_root import Sent, bind_broadcast_object
from collectives.bound.scatter import bind_scatter
from collectives.caching import LRU
from collectives.calls import PASS
from collectives.calls.all_to_all import Parts
from collectives.calls.arguments import Rows
from collectives.calls.counts import ANY_ROOM
from collectives.calls.movements import (
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
        self._scattered: LRU[tuple[Any, ...], bytes] = LRU()
        """What the root sends of arrays of a dtype and shape."""

    def broadcast(self, array: Any, root: int) -> Any:
        """As `Communicator.broadcast`."""
        if type(array) is np.ndarray:
            bound = self.known.get(("broadcast", None, array.dtype, array.shape, root))
            if bound is not None and bound(None, array) is not PASS:
                return array
        elif (views := self._tensors.views(array, array)) is not None:
            self.broadcast(views[0], root)
            return array
        elif on_gpu(array):
            return self._on_gpu("broadcast", array, array, root=root)
        given = to_array(array)
        output = broadcast_output(given, array, on_root=self._engine.rank == root)

        def bind() -> Bound:
            signature = broadcast_signature(given, root, None)
            return bind_broadcast(self._engine, signature, given.dtype, given.shape, root)

        def perform() -> Any:
            key = "broadcast", None, given.dtype, given.shape, root
            self._call(key, bind, None, output.buffer.reshape(given.shape))
            return output.deliver()

        return self._engine.whole(perform)

    def all_gather(self, array: Any, axis: Any, out: Any) -> Any:
        """As `Communicator.all_gather`."""
        if type(array) is np.ndarray and type(axis) is int and axis == 0:
            bound = self.known.get(("all_gather", array.dtype, array.shape, _room(out), 0, None))
            if bound is not None and (joined := bound(array, out)) is not PASS:
                return joined
        elif (views := self._tensors.views(array, out)) is not None:
            if out is None:
                return self._engine.whole(as_tensor, self.all_gather, views[0], axis, None)
            self.all_gather(views[0], axis, views[1])
            return out
        elif on_gpu(array):
            return self._on_gpu("all_gather", array, out, axis=axis)
        return self._join("all_gather", array, axis, out)

    def gather(self, array: Any, root: int, axis: Any, out: Any) -> Any:
        """As `Communicator.gather`."""
        if root != self._engine.rank:
            out = None
        if type(array) is np.ndarray and type(axis) is int and axis == 0:
            bound = self.known.get(("gather", array.dtype, array.shape, _room(out), 0, root))
            if bound is not None and (joined := bound(array, out)) is not PASS:
                return joined
        elif (views := self._tensors.views(array, out)) is not None:
            if out is None:
                return self._engine.whole(as_tensor, self.gather, views[0], root, axis, None)
            self.gather(views[0], root, axis, views[1])
            return out
        elif on_gpu(array):
            return PASS
        return self._join("gather", array, axis, out, root)

    def _join(
        self, collective: str, array: Any, axis: Any, out: Any, root: int | None = None
    ) -> Any:
        """all_gather or gather of any array; `root` is that of a gather."""
        rows = Rows(to_array(array), axis)
        if out is None or root is not None:
            refuse_lost_gradient(array, "array")
        room = ANY_ROOM if out is None else rows_of(out, rows)

        def bind() -> Bound:
            signature = signature_of(collective, rows, root, None)
            return bind_all_gather(self._engine, signature, rows.count, room, rows.rest, rows.dtype)

        def perform() -> Any:
            shape = rows.count, *rows.rest
            key = collective, rows.dtype, shape, room, rows.axis, root
            joined = self._call(key, bind, rows.flat.reshape(shape), None)
            if joined is None:
                return None
            if out is None:
                return like(array)(rows.array(joined, len(joined)))
            output = rows.output(out, len(joined), rows.dtype, array)
            output.buffer[...] = joined.reshape(-1)
            return output.deliver()

        return self._engine.whole(perform)

    def scatter(self, array: Any, root: int, axis: int, out: Any) -> Any:
        """As `Communicator.scatter`."""
        sent, flat = self._sent(array, axis) if self._engine.rank == root else (None, None)
        bind = partial(bind_scatter, self._engine, root)
        return self._call(("scatter", root), bind, sent, (array, flat, out))

    def _sent(self, array: Any, axis: int) -> tuple[Sent, Array | None]:
        """What the root of a scatter sends, and its elements; the error if there are none."""
        plain = type(array) is np.ndarray and type(axis) is int and axis == 0
        if plain and array.flags.carray:
            pickled = self._scattered.get((array.dtype, array.shape))
            if pickled is not None:
                flat = array.reshape(-1)
                return Sent(pickled, flat.nbytes, flat), flat
        try:
            found, rows = look_at(self._engine, array, axis)
        except Exception as error:
            return Sent(outcome_of(partial(_raise, error))), None
        pickled = outcome_of(lambda: found)
        if plain:
            self._scattered.put((array.dtype, array.shape), pickled)
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
        size = self._engine.size
        if type(arrays) is np.ndarray:
            kind = "all_to_all", "equal", arrays.dtype, arrays.shape, None
            bound = self.known.get(kind)
            if bound is None and arrays.ndim and not len(arrays) % size:
                self._check_open()
                bound = bind_equal(self._engine, arrays.shape, to_array(arrays, "arrays").dtype)
                self.known.put(kind, bound)
            if bound is not None and (result := bound(arrays, out)) is not PASS:
                return result
        elif (views := self._tensors.views(arrays, out)) is not None:
            source, target = views
            if out is None:
                return self._engine.whole(as_tensor, self.all_to_all, source, None)
            # Not `*views`: a signal's handler may run after such a call has returned.
            self.all_to_all(source, target)
            return out
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


def _room(out: Any) -> int | None:
    """How many rows `out` holds; None where no array is stored into it as it comes."""
    if out is None:
        return ANY_ROOM
    return len(out) if type(out) is np.ndarray and out.ndim else None


def _raise(error: Exception) -> NoReturn:
    raise error
