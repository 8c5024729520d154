"""The blocking calls that move arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.bound.all_gather import all_gather, gather
from collectives.bound.all_to_all import all_to_all
from collectives.bound.broadcast import broadcast
from collectives.bound.calls import BoundCalls
from collectives.bound.from_root import broadcast_object, sent_of
from collectives.bound.scatter import scatter
from collectives.calls import PASS
from collectives.calls.counts import ANY_ROOM
from collectives.cuda.runtime import on_gpu


class BoundMovementCalls(BoundCalls):
    """broadcast, all_gather, gather, scatter, all_to_all, broadcast_object."""

    def broadcast(self, array: Any, root: int, algorithm: str | None) -> Any:
        """As `Communicator.broadcast`."""
        got: Any = PASS
        if type(array) is np.ndarray:
            bound = self._find(("broadcast", None, array.dtype, array.shape, root), algorithm)
            if bound is not None and bound(None, array) is not PASS:
                return array
        elif (views := self._tensors.views(array, array)) is not None:
            memory = views[0]
            key = "broadcast", None, memory.dtype, memory.shape, root
            got = self._on_tensor(key, algorithm, None, memory, array)
        elif algorithm is None and on_gpu(array):
            got = self._on_gpu("broadcast", array, array, root=root)
        if got is not PASS:
            return got
        return self._run(broadcast(self._engine, array, root=root, algorithm=algorithm))

    def all_gather(self, array: Any, axis: Any, out: Any, algorithm: str | None) -> Any:
        """As `Communicator.all_gather`."""
        got = self._joined("all_gather", array, None, axis, out, algorithm)
        if got is PASS and algorithm is None and on_gpu(array):
            got = self._on_gpu("all_gather", array, out, axis=axis)
        if got is not PASS:
            return got
        return self._run(all_gather(self._engine, array, axis=axis, out=out, algorithm=algorithm))

    def gather(self, array: Any, root: int, axis: Any, out: Any, algorithm: str | None) -> Any:
        """As `Communicator.gather`."""
        if root != self._engine.rank:
            out = None
        got = self._joined("gather", array, root, axis, out, algorithm)
        if got is not PASS:
            return got
        return self._run(
            gather(self._engine, array, root=root, axis=axis, out=out, algorithm=algorithm)
        )

    def _joined(
        self,
        collective: str,
        array: Any,
        root: int | None,
        axis: Any,
        out: Any,
        algorithm: str | None,
    ) -> Any:
        if type(axis) is not int or axis != 0:
            return PASS
        if type(array) is np.ndarray:
            key = collective, array.dtype, array.shape, _room(out), 0, root
            bound = self._find(key, algorithm)
            return PASS if bound is None else bound(array, out)
        if (views := self._tensors.views(array, out)) is None:
            return PASS
        source, target = views
        key = collective, source.dtype, source.shape, _room(target), 0, root
        return self._on_tensor(key, algorithm, source, target, out)

    def scatter(self, array: Any, root: int, axis: Any, out: Any, algorithm: str | None) -> Any:
        """As `Communicator.scatter`."""
        bound = self._find(("scatter", root, axis), algorithm) if type(axis) is int else None
        if bound is not None and (got := bound(array, (axis, out))) is not PASS:
            return got
        return self._run(
            scatter(self._engine, array, root=root, axis=axis, out=out, algorithm=algorithm)
        )

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """As `Communicator.broadcast_object`."""
        bound = self.bound_calls.get(("broadcast_object", root))
        if bound is not None:
            got = bound(sent_of(self._engine, obj, root), None)
            if got is not PASS:
                return got
        return self._run(broadcast_object(self._engine, obj, root))

    def all_to_all(self, arrays: Any, out: Any, algorithm: str | None) -> Any:
        """As `Communicator.all_to_all`."""
        got: Any = PASS
        if algorithm is not None:
            pass
        elif type(arrays) is np.ndarray:
            bound = self.bound_calls.get(("all_to_all", "equal", arrays.dtype, arrays.shape, None))
            if bound is not None:
                got = bound(arrays, out)
        elif (views := self._tensors.views(arrays, out)) is not None:
            source, target = views
            key = "all_to_all", "equal", source.dtype, source.shape, None
            got = self._on_tensor(key, None, source, target, out)
        if got is not PASS:
            return got
        return self._run(all_to_all(self._engine, arrays, out=out, algorithm=algorithm))


def _room(out: Any) -> int | None:
    """How many rows `out` holds; None where no array is stored into it as it comes."""
    if out is None:
        return ANY_ROOM
    return len(out) if type(out) is np.ndarray and out.ndim else None
