"""The bound calls that reduce arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.arrays.kinds import Output, copied, may_overlap
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.bound.bind import bind_all_reduce
from collectives.bound.calls import Bound, BoundCalls, as_tensor
from collectives.bound.folds import bind_reduce, bind_reduce_scatter, bind_scan
from collectives.calls import PASS
from collectives.calls.arguments import Rows, split_rows
from collectives.calls.reductions import ReduceInput, reduce_scatter_signature
from collectives.calls.scans import refuse_mean
from collectives.consistency.signature import check_text
from collectives.cuda.runtime import on_gpu
from collectives.reductions.reduction import Array, ReduceOp


class BoundReductionCalls(BoundCalls):
    """all_reduce, reduce, scan, exscan, reduce_scatter."""

    def all_reduce(self, array: Any, op: ReduceOp | str, out: Any, what: str | None) -> Any:
        """As `Communicator.all_reduce`."""
        if what is not None:
            check_text(what)
        if (views := self._tensors.views(array, out)) is not None:
            source, target = views
            if out is None:
                return self._engine.whole(
                    as_tensor, self._all_reduce_memory, source, None, op, what
                )
            # Not `*views`: a signal's handler may run after such a call has returned.
            self._all_reduce_memory(source, target, op, what)
            return out
        if on_gpu(array):
            return PASS if what is not None else self._on_gpu("all_reduce", array, out, op)
        given = ReduceInput(array, op)
        return self._engine.whole(self._all_reduce, given, op, given.output(out), what)

    def _all_reduce_memory(
        self, source: Array, target: Array | None, op: ReduceOp | str, what: str | None
    ) -> Any:
        """Of tensors' memory."""
        known = what is None and type(op) is str
        bound = self.known.get((op, source.dtype, source.shape)) if known else None
        result: Any = PASS if bound is None else bound(source, target)
        return self.all_reduce(source, op, target, what) if result is PASS else result

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

    def reduce(self, array: Any, op: ReduceOp | str, root: int, out: Any) -> Any:
        """As `Communicator.reduce`."""
        if type(array) is not np.ndarray:
            refuse_lost_gradient(array, "array")
        return self._fold("reduce", array, op, root, out if root == self._engine.rank else None)

    def scan(self, collective: str, array: Any, op: ReduceOp | str, out: Any) -> Any:
        """As `Communicator.scan` or `exscan`."""
        return self._fold(collective, array, op, None, out)

    def _fold(
        self, collective: str, array: Any, op: ReduceOp | str, root: int | None, out: Any
    ) -> Any:
        """A reduction of which the root, or every rank, gets a result of the array's shape."""
        if type(array) is np.ndarray and isinstance(op, str | ReduceOp):
            bound = self.known.get((collective, op, array.dtype, array.shape, root))
            if bound is not None and (result := bound(array, out)) is not PASS:
                return result
        elif (views := self._tensors.views(array, out)) is not None:
            if out is None:
                return self._engine.whole(
                    as_tensor, self._fold, collective, views[0], op, root, None
                )
            self._fold(collective, views[0], op, root, views[1])
            return out
        if on_gpu(array):
            if root is None:
                return PASS  # a scan, which no path has
            return self._on_gpu(collective, array, out, op, root=root)
        given = ReduceInput(array, op)
        if collective != "reduce":
            refuse_mean(collective, given.op)
        output = given.output(out) if root in (None, self._engine.rank) else None
        return self._engine.whole(self._fold_given, collective, given, op, root, output)

    def _fold_given(
        self,
        collective: str,
        given: ReduceInput,
        op: ReduceOp | str,
        root: int | None,
        output: Output | None,
    ) -> Any:
        def bind() -> Bound:
            signature = given.signature(collective, root)
            if root is None:
                return bind_scan(self._engine, signature, given.op, given.dtype, given.shape)
            return bind_reduce(self._engine, signature, given.op, given.dtype, given.shape, root)

        key = collective, op, given.array.dtype, given.shape, root
        if output is None:
            return self._call(key, bind, given.flat().reshape(given.shape), None)
        source, target = given.source_for(output), output.buffer.reshape(given.shape)
        self._call(key, bind, target if source is None else source.reshape(given.shape), target)
        return output.deliver()

    def reduce_scatter(self, array: Any, op: ReduceOp | str, axis: Any, out: Any) -> Any:
        """As `Communicator.reduce_scatter`."""
        if type(array) is np.ndarray and array.ndim and isinstance(op, str | ReduceOp):
            bound = self.known.get(("reduce_scatter", op, array.dtype, array.shape, 0))
            if (
                bound is not None
                and type(axis) is int
                and axis == 0
                and (part := bound(array, out)) is not PASS
            ):
                return part
        elif (views := self._tensors.views(array, out)) is not None:
            if out is None:
                return self._engine.whole(as_tensor, self.reduce_scatter, views[0], op, axis, None)
            self.reduce_scatter(views[0], op, axis, views[1])
            return out
        elif on_gpu(array):
            return self._on_gpu("reduce_scatter", array, out, op, axis)
        given = ReduceInput(array, op)
        if out is None:
            refuse_lost_gradient(array, "array")
        rows = Rows(given.converted(), axis)
        counts = split_rows(rows.count, self._engine.size)
        output = rows.output(out, counts[self._engine.rank], given.dtype, given.original)
        source, target, shape = rows.flat, output.buffer, (rows.count, *rows.rest)
        if out is not None and may_overlap(source, target):
            source = copied(source)

        def bind() -> Bound:
            signature = reduce_scatter_signature(given, rows.axis, None)
            return bind_reduce_scatter(
                self._engine, signature, given.op, given.dtype, shape, counts
            )

        def perform() -> Any:
            part = target.reshape(counts[self._engine.rank], *rows.rest)
            key = "reduce_scatter", op, given.array.dtype, given.shape, rows.axis
            self._call(key, bind, source.reshape(shape), part)
            return output.deliver()

        return self._engine.whole(perform)
