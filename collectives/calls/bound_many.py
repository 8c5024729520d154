"""Bound calls of all_reduce_many, for lists of arrays that were reduced before.

A program reduces the same gradients at every step. The arrays are recognized by identity, and all
that is done for each of them is done in loops of C. What the ranks agree on, and so the path of
their data, is what it was when the list was bound. A list that has changed since is reduced
unbound, through the same memory in the same steps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter, setitem
from typing import Any, TypeAlias

import numpy as np

from collectives.caching import LRU
from collectives.calls import PASS, Operation
from collectives.calls.bound import bind
from collectives.calls.many import Many, Part, SharedBucket, overlapping
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp

Key: TypeAlias = tuple[Any, ...]
Outs: TypeAlias = list[Any] | None

_dtypes: Callable[[Any], Any] = attrgetter("dtype")
_writeable: Callable[[Any], Any] = attrgetter("flags.writeable")
_shapes: Callable[[Any], Any] = attrgetter("shape")
_copy: Callable[[Array], Array] = np.ndarray.copy


class Same:
    """Arrays to be recognized, by weak references, which keep no array alive.

    NumPy doesn't resize an array that has one, so that their sizes stay what they were.
    """

    def __init__(self, arrays: list[Array]) -> None:
        self._freed: list[Any] = []
        # Another array may get the number of one that was freed, which is noted before that.
        self._references = [weakref.ref(array, self._freed.append) for array in arrays]
        self._numbers = list(map(id, arrays))
        self._dtypes, self._shapes = list(map(_dtypes, arrays)), list(map(_shapes, arrays))

    def fits(self, arrays: list[Any]) -> bool:
        """Whether these are the same objects, of the same dtypes and shapes as then."""
        return (
            not self._freed
            and list(map(id, arrays)) == self._numbers
            and list(map(_dtypes, arrays)) == self._dtypes
            and list(map(_shapes, arrays)) == self._shapes
        )


class Known:
    """A bound call, all of whose buckets go through the node's memory."""

    def __init__(
        self,
        engine: Engine,
        parts: list[SharedBucket],
        operation: Operation,
        arrays: list[Array],
        out: list[Array] | None,
    ) -> None:
        self._parts, self._call = parts, bind(engine, operation.signature, self._run)
        self._errstate = engine.errstate.run
        self._arrays = Same(arrays)
        self._outs = None if out is None or out is arrays else Same(out)
        self._in_place = out is arrays
        places = [index for part in parts for index in part.indices]
        self._in_order = None if places == sorted(places) else itemgetter(*np.argsort(places))

    def fits(self, arrays: list[Any], out: list[Any] | None) -> bool:
        """Whether the call is the same again, and its results can be stored."""
        if not self._arrays.fits(arrays) or not all(map(_writeable, out or ())):
            return False
        if out is None or out is arrays:
            return self._outs is None and self._in_place == (out is arrays)
        return self._outs is not None and self._outs.fits(out)

    def make(self, arrays: list[Array], out: list[Array] | None) -> Any:
        """Make the call; PASS where a first registered array has been made since."""
        return self._call(arrays, out)

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
    """The fused reductions of one communicator."""

    def __init__(self, engine: Engine, many: Many) -> None:
        """`many` keeps the buckets of the lists."""
        self._engine, self._many = engine, many
        self._known: LRU[Key, Known] = LRU()
        self._seen: LRU[Key, None] = LRU()

    def forget(self) -> None:
        """Cut lists into buckets anew, and select their paths anew."""
        self.forget_bound()
        self._many.forget()

    def forget_bound(self) -> None:
        """Bind every list anew."""
        self._known.clear()
        self._seen.clear()

    def reduce_known(self, arrays: Any, op: Any, out: Any, bucket_bytes: Any) -> Any:
        """Make the call where it is bound; PASS elsewhere."""
        key = _key(arrays, op, out, bucket_bytes)
        known = None if key is None else self._known.get(key)
        if known is None or not known.fits(arrays, out):
            return PASS
        return known.make(arrays, out)

    def reduce(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str,
        out: Sequence[Any] | None,
        bucket_bytes: int | None,
    ) -> list[Any]:
        """Make the call, and bind it where it recurs."""
        key = _key(arrays, op, out, bucket_bytes)
        return self._engine.whole(self._reduce, key, arrays, op, out, bucket_bytes)

    def _reduce(
        self, key: Key | None, arrays: Sequence[Any], op: Any, out: Any, bucket_bytes: int | None
    ) -> list[Any]:
        operation, parts = self._many.operation(arrays, op, out, bucket_bytes)
        reduced: list[Any] = self._engine.perform(operation.signature, operation.run)
        if key is not None:
            self._remember(key, parts, operation, arrays, out)
        return reduced

    def _remember(
        self, key: Key, parts: list[Part], operation: Operation, arrays: Any, out: Any
    ) -> None:
        """Prepare for the call's return, once it has come twice: to prepare takes time."""
        if key not in self._seen:
            self._seen.put(key, None)
            return
        staged = [part for part in parts if isinstance(part, SharedBucket)]
        if len(staged) < len(parts) or not _plain(arrays, out, staged):
            return
        self._known.put(key, Known(self._engine, staged, operation, arrays, out))


def _key(arrays: Any, op: Any, out: Any, bucket_bytes: Any) -> Key | None:
    """By what a call is looked for; None for one that isn't kept."""
    if type(arrays) is not list or not arrays or not isinstance(op, str | ReduceOp):
        return None
    if bucket_bytes is not None and type(bucket_bytes) is not int:
        return None
    if out is None:
        return (op, bucket_bytes, len(arrays), id(arrays[0]), 0)
    if type(out) is not list or len(out) != len(arrays):
        return None
    return (op, bucket_bytes, len(arrays), id(arrays[0]), id(out[0]))


def _plain(arrays: list[Any], out: list[Any] | None, parts: list[SharedBucket]) -> bool:
    """Whether these can go as they are: the parts hold all arrays, in the dtypes of the folds."""
    if any(type(array) is not np.ndarray for array in [*arrays, *(out or ())]):
        return False
    if any(array.dtype != part.dtype for part in parts for array in part.pick(arrays)):
        return False
    return out is None or len(parts) == 1 or not overlapping(arrays, out)
