"""Bound calls of all_reduce_many, for lists of arrays like those that were reduced before.

A program reduces gradients of the same shapes and dtypes at every step, in the same arrays or in
new ones. What is done for each array is done in loops of C. What the ranks agree on, and so the
path of their data, is what it was when the list was bound. Other lists are reduced unbound, through
the same memory in the same steps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter, setitem
from typing import Any

import numpy as np

from collectives.bound.bind import bind
from collectives.caching import LRU
from collectives.calls import PASS, Operation
from collectives.calls.many import Many, Part, overlapping
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp
from collectives.schedules.paths import PACKED
from collectives.shm.packed import SharedBucket

_dtypes: Callable[[Any], Any] = attrgetter("dtype")
_writeable: Callable[[Any], Any] = attrgetter("flags.writeable")
_shapes: Callable[[Any], Any] = attrgetter("shape")
_copy: Callable[[Array], Array] = np.ndarray.copy
_ARRAYS = {np.ndarray}
_LISTS = 64


class Key:
    """By what a call is looked for. Its hash, for which all shapes are read, is computed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: Any) -> None:
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._parts == other._parts


class Same:
    """Arrays to be recognized, by weak references, which keep no array alive.

    NumPy doesn't resize an array that has one, so that their memory stays what it was.
    """

    def __init__(self, arrays: list[Array]) -> None:
        self._freed: list[Any] = []
        # Another array may get the number of one that was freed, which is noted before that.
        self._references = [weakref.ref(array, self._freed.append) for array in arrays]
        self._numbers = list(map(id, arrays))

    def fits(self, arrays: list[Any]) -> bool:
        """Whether these are the same objects."""
        return not self._freed and list(map(id, arrays)) == self._numbers


class Apart:
    """The lists of which no input lies in another array's output, as was found before."""

    def __init__(self) -> None:
        self._found: LRU[tuple[int, int], Same] = LRU(_LISTS)

    def holds(self, arrays: list[Array], out: list[Array]) -> bool:
        """Whether no output is written before another array's input in it is read."""
        key, every = (id(arrays[0]), id(out[0])), arrays if out is arrays else [*arrays, *out]
        found = self._found.recall(key)
        if found is not None and found.fits(every):
            return True
        if overlapping(arrays, out):
            return False
        self._found.put(key, Same(every))
        return True


class Known:
    """A bound call, all of whose buckets go through the node's memory."""

    def __init__(
        self, engine: Engine, parts: list[SharedBucket], operation: Operation, apart: Apart
    ) -> None:
        self._parts = parts
        self.make = bind(engine, operation.signature, self._run, path=PACKED)
        """A function (arrays, out); PASS where a first registered array has been made since."""
        self._errstate, self._apart = engine.errstate.run, apart
        places = [index for part in parts for index in part.indices]
        self._in_order = None if places == sorted(places) else itemgetter(*np.argsort(places))

    def can_store(self, arrays: list[Array], out: list[Array] | None) -> bool:
        """Whether results can be stored there as the buckets are reduced, one after the other."""
        if out is None:
            return True
        return all(map(_writeable, out)) and (
            len(self._parts) == 1 or self._apart.holds(arrays, out)
        )

    def _run(self, arrays: list[Array], out: list[Array] | None, index: int | None) -> Any:
        return self._errstate(self._reduce, arrays, out)

    # The list is complete before the call is: a signal's exception after the call would be raised
    # to a caller that takes it for not made.
    def _reduce(self, arrays: list[Array], out: list[Array] | None) -> list[Array]:
        results: list[Array] = []
        for part in self._parts:
            views = part.reduce(part.pick(arrays))
            if out is None:
                results.extend(map(_copy, views))
            else:
                deque(map(setitem, part.pick(out), repeat(...), views), maxlen=0)
        if out is not None:
            return list(out)
        return results if self._in_order is None else list(self._in_order(results))


class ManyReducer:
    """Blocking calls of all_reduce_many; a list that recurs is bound."""

    def __init__(self, engine: Engine, many: Many) -> None:
        """`many` keeps the buckets of the lists."""
        self._engine, self._many = engine, many
        self._known: LRU[Key, Known] = LRU()
        self._seen: LRU[Key, None] = LRU()
        self._apart = Apart()

    def forget(self) -> None:
        """Cut lists into buckets anew, and select their paths anew."""
        self.forget_bound()
        self._many.forget()

    def forget_bound(self) -> None:
        """Bind every list anew."""
        self._known = LRU()  # a new one, by which persistent calls see it
        self._seen.clear()

    def reduce_known(self, arrays: Any, op: Any, out: Any, bucket_bytes: Any, what: Any) -> Any:
        """Make the call where it is bound; PASS elsewhere."""
        key = _key(arrays, op, out, bucket_bytes, what)
        # To count it as used would compare all shapes once more.
        known = None if key is None else self._known.get(key)
        if known is None or not known.can_store(arrays, out):
            return PASS
        return known.make(arrays, out)

    def persistent(
        self, arrays: Any, op: Any, out: Any, what: str | None, make_unbound: Callable[[], Any]
    ) -> Callable[[], Any]:
        """As `Communicator.persistent_all_reduce_many`; `make_unbound` makes what isn't bound."""
        key, known, found_among, places = _key(arrays, op, out, None, what), None, None, None

        def make() -> Any:
            nonlocal known, found_among, places
            if found_among is not self._known:
                known = None if key is None else self._known.get(key)
                if known is None or not known.can_store(arrays, out):
                    return make_unbound()
                found_among = self._known
                # An array that is made read-only later must not end the call on one rank alone.
                places = None if out is None else [array.view() for array in out]
            assert known is not None
            result = known.make(arrays, places)
            if result is PASS:
                return make_unbound()
            return result if out is None else list(out)

        return make

    def reduce(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str,
        out: Sequence[Any] | None,
        bucket_bytes: int | None,
        what: str | None,
    ) -> list[Any]:
        """Make the call, and bind it where it recurs."""
        key = _key(arrays, op, out, bucket_bytes, what)
        return self._engine.whole(self._reduce, key, arrays, op, out, bucket_bytes, what)

    def _reduce(
        self,
        key: Key | None,
        arrays: Sequence[Any],
        op: Any,
        out: Any,
        bucket_bytes: int | None,
        what: str | None,
    ) -> list[Any]:
        operation, parts = self._many.operation(arrays, op, out, bucket_bytes, what)
        reduced: list[Any] = self._engine.perform(operation.signature, operation.run)
        if key is not None:
            self._remember(key, parts, operation, arrays)
        return reduced

    def _remember(self, key: Key, parts: list[Part], operation: Operation, arrays: Any) -> None:
        """Prepare for the call's return, once it has come twice: to prepare takes time."""
        if key not in self._seen:
            self._seen.put(key, None)
            return
        staged = [part for part in parts if isinstance(part, SharedBucket)]
        if len(staged) == len(parts) and _plain(arrays, staged):
            self._known.put(key, Known(self._engine, staged, operation, self._apart))


def _key(arrays: Any, op: Any, out: Any, bucket_bytes: Any = None, what: Any = None) -> Key | None:
    """Of the call's arrays the shapes and dtypes. None for a call that isn't kept."""
    if type(arrays) is not list or set(map(type, arrays)) != _ARRAYS:
        return None
    if not isinstance(op, str | ReduceOp):
        return None
    if bucket_bytes is not None and type(bucket_bytes) is not int:
        return None
    if what is not None and type(what) is not str:
        return None
    shapes, dtypes = tuple(map(_shapes, arrays)), tuple(map(_dtypes, arrays))
    if out is None:
        return Key(op, bucket_bytes, what, shapes, dtypes)
    if out is not arrays:
        if type(out) is not list or set(map(type, out)) != _ARRAYS:
            return None
        if tuple(map(_shapes, out)) != shapes or tuple(map(_dtypes, out)) != dtypes:
            return None
    return Key(op, bucket_bytes, what, shapes, dtypes, "out")


def _plain(arrays: list[Any], parts: list[SharedBucket]) -> bool:
    """Whether these can go as they are: the parts hold all arrays, in the dtypes of the folds."""
    return all(array.dtype == part.dtype for part in parts for array in part.pick(arrays))
