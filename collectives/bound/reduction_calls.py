"""The blocking calls that reduce arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.bound.calls import OPS, BoundCalls
from collectives.bound.reductions import all_reduce, exscan, key_of, reduce, reduce_scatter, scan
from collectives.calls import PASS
from collectives.cuda.runtime import on_gpu
from collectives.reductions.reduction import ReduceOp


class BoundReductionCalls(BoundCalls):
    """all_reduce, reduce, scan, exscan, reduce_scatter."""

    def all_reduce(
        self, array: Any, op: ReduceOp | str, out: Any, algorithm: str | None, what: str | None
    ) -> Any:
        """As `Communicator.all_reduce`, which has looked for most calls of NumPy arrays."""
        got: Any = PASS
        if not isinstance(op, OPS) or not (what is None or type(what) is str):
            pass
        elif type(array) is np.ndarray:
            bound = None if algorithm is None else self._find(key_of(array, op, what), algorithm)
            if bound is not None:
                got = bound(array, out)
        elif (views := self._tensors.views(array, out)) is not None:
            source, target = views
            key = (op, source.dtype, source.shape) if what is None else key_of(source, op, what)
            got = self._on_tensor(key, algorithm, source, target, out)
        elif algorithm is None and what is None and on_gpu(array):
            got = self._on_gpu("all_reduce", array, out, op)
        if got is not PASS:
            return got
        return self._run(
            all_reduce(self._engine, array, op, out=out, algorithm=algorithm, what=what)
        )

    def reduce(
        self, array: Any, op: ReduceOp | str, root: int, out: Any, algorithm: str | None
    ) -> Any:
        """As `Communicator.reduce`."""
        if root != self._engine.rank:
            out = None
        got = self._fold("reduce", array, op, root, out, algorithm)
        if got is not PASS:
            return got
        return self._run(reduce(self._engine, array, op, root=root, out=out, algorithm=algorithm))

    def reduce_scatter(
        self, array: Any, op: ReduceOp | str, axis: Any, out: Any, algorithm: str | None
    ) -> Any:
        """As `Communicator.reduce_scatter`."""
        # An array without axes counts as one row.
        if type(axis) is int and axis == 0 and getattr(array, "ndim", 0) > 0:
            got = self._fold("reduce_scatter", array, op, 0, out, algorithm)
            if got is not PASS:
                return got
        return self._run(
            reduce_scatter(self._engine, array, op, axis=axis, out=out, algorithm=algorithm)
        )

    def scan(self, array: Any, op: ReduceOp | str, out: Any, algorithm: str | None) -> Any:
        """As `Communicator.scan`."""
        got = self._fold("scan", array, op, None, out, algorithm)
        if got is not PASS:
            return got
        return self._run(scan(self._engine, array, op, out=out, algorithm=algorithm))

    def exscan(self, array: Any, op: ReduceOp | str, out: Any, algorithm: str | None) -> Any:
        """As `Communicator.exscan`."""
        got = self._fold("exscan", array, op, None, out, algorithm)
        if got is not PASS:
            return got
        return self._run(exscan(self._engine, array, op, out=out, algorithm=algorithm))

    def _fold(
        self,
        collective: str,
        array: Any,
        op: ReduceOp | str,
        root: int | None,
        out: Any,
        algorithm: str | None,
    ) -> Any:
        """The call if it is bound; PASS else."""
        if not isinstance(op, OPS):
            return PASS
        if type(array) is np.ndarray:
            bound = self._find((collective, op, array.dtype, array.shape, root), algorithm)
            return PASS if bound is None else bound(array, out)
        if (views := self._tensors.views(array, out)) is not None:
            source, target = views
            key = collective, op, source.dtype, source.shape, root
            return self._on_tensor(key, algorithm, source, target, out)
        # No path on GPUs has scans.
        if algorithm is None and root is not None and on_gpu(array):
            return self._on_gpu(collective, array, out, op, root=root)
        return PASS
