"""all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

from typing import Any

from collectives import algorithms
from collectives.arrays.kinds import (
    Output,
    address,
    after_reading,
    check_same_memory,
    copied,
    flat,
    given_output,
    is_device,
    may_overlap,
    new_output,
    to_array,
)
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.calls import Operation
from collectives.calls.arguments import Rows, split_rows
from collectives.consistency.signature import Signature, check_index, check_text, dtype_name, forced
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, as_op, reduction_for


class ReduceInput:
    """An array that is to be reduced: flat, in the dtype of the fold."""

    def __init__(self, array: Any, op: ReduceOp | str, argument: str = "array") -> None:
        self.original, self.op, self.argument = array, as_op(op), argument
        self.array = to_array(array, argument)
        self.on_gpu = is_device(self.array)
        self.shape = self.array.shape
        dtype = self.array.dtype
        if not dtype.isnative:
            dtype = dtype.newbyteorder("=")
        try:
            self.dtype = reduction_for(self.op, dtype, self.on_gpu).dtype
        except TypeError as error:
            raise TypeError(f"{argument}: {error}") from None

    def signature(
        self, collective: str, root: int | None = None, detail: str | None = None
    ) -> Signature:
        """The call that reduces it."""
        # The order of bytes doesn't count: all ranks' elements are brought into the machine's.
        dtype = dtype_name(self.array.dtype.newbyteorder("="))
        op, nbytes = self.op.value, self.array.nbytes
        return Signature(collective, op, dtype, self.shape, root, detail, nbytes)

    def output(self, out: Any, name: str = "out") -> Output:
        """Where a result of the same shape goes."""
        if out is None:
            refuse_lost_gradient(self.original, self.argument)
            return new_output(self.shape, self.dtype, self.original)
        output = given_output(out, self.shape, self.dtype, name)
        check_same_memory(self.array, output, name)
        return output

    def source_for(self, output: Output) -> Array | None:
        """The flat input, or None where it lies in the output already."""
        if output.view is self.array:
            return None
        source = self.flat()
        if not may_overlap(source, output.buffer):
            return source
        return None if address(source) == address(output.buffer) else copied(source)

    def flat(self) -> Array:
        """The elements in C order, in the dtype of the fold."""
        return flat(self.converted())

    def converted(self) -> Array:
        """The array in the dtype of the fold."""
        return self.array if self.array.dtype == self.dtype else self.array.astype(self.dtype)


def all_reduce(
    engine: Engine,
    array: Any,
    op: ReduceOp | str = "sum",
    *,
    out: Any = None,
    algorithm: str | None = None,
    what: str | None = None,
) -> Operation:
    """The reduction of all ranks' arrays, on every rank."""
    algorithms.check_name("all_reduce", algorithm)
    check_text(what)
    given = ReduceInput(array, op)
    output = given.output(out)
    source = given.source_for(output)

    def perform(engine: Engine) -> Any:
        engine.run("all_reduce", source, output.buffer, op=given.op, algorithm=algorithm)
        return output.deliver()

    details = [each for each in (forced(algorithm), what) if each is not None]
    signature = given.signature("all_reduce", detail=", ".join(details) or None)
    return Operation(signature, perform, given.on_gpu)


def barrier(engine: Engine, what: str | None = None) -> Operation:
    """A call without data, which returns once every rank has made it with the same text."""
    check_text(what)
    return Operation(Signature("barrier", detail=what), lambda engine: None)


def reduce(
    engine: Engine,
    array: Any,
    op: ReduceOp | str = "sum",
    *,
    root: int = 0,
    out: Any = None,
    algorithm: str | None = None,
) -> Operation:
    """The reduction of all ranks' arrays, on the root alone; None elsewhere."""
    root = check_index("root", root, engine.size)
    algorithms.check_name("reduce", algorithm)
    # On every rank alike, though the root alone gets a result.
    refuse_lost_gradient(array, "array")
    given = ReduceInput(array, op)
    output = given.output(out) if engine.rank == root else None

    def perform(engine: Engine) -> Any:
        if output is None:
            source: Array | None = given.flat()
            target = engine.work(given.array.size, given.dtype, given.array)
        else:
            source, target = given.source_for(output), output.buffer
        engine.run("reduce", source, target, op=given.op, root=root, algorithm=algorithm)
        if output is not None:
            return output.deliver()
        after_reading(array)
        return None

    return Operation(given.signature("reduce", root, forced(algorithm)), perform, given.on_gpu)


def reduce_scatter(
    engine: Engine,
    array: Any,
    op: ReduceOp | str = "sum",
    *,
    axis: int = 0,
    out: Any = None,
    algorithm: str | None = None,
) -> Operation:
    """Rank r's block, of `numpy.array_split` along the axis, of the reduction."""
    algorithms.check_name("reduce_scatter", algorithm)
    given = ReduceInput(array, op)
    if out is None:
        refuse_lost_gradient(array, "array")
    rows = Rows(given.converted(), axis)
    counts = split_rows(rows.count, engine.size)
    lengths = tuple(count * rows.elements for count in counts)
    result = rows.output(out, counts[engine.rank], given.dtype, given.original)
    source, target = rows.flat, result.buffer
    if out is not None and may_overlap(source, target):
        source = copied(source)

    def perform(engine: Engine) -> Any:
        engine.run(
            "reduce_scatter", source, target, lengths=lengths, op=given.op, algorithm=algorithm
        )
        return result.deliver()

    signature = reduce_scatter_signature(given, rows.axis, algorithm)
    return Operation(signature, perform, given.on_gpu)


def reduce_scatter_signature(given: ReduceInput, axis: int, algorithm: str | None) -> Signature:
    """The call that reduces the array and splits it along the axis."""
    detail = f"axis={axis}" if algorithm is None else f"axis={axis}, {algorithm=}"
    return given.signature("reduce_scatter", detail=detail)
