"""What a reduction takes: the array in the dtype of the fold, and where its result goes."""

from __future__ import annotations

from typing import Any

from collectives.arrays.kinds import (
    Output,
    address,
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
from collectives.consistency.signature import Signature, detail_of, dtype_name
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


def reduce_scatter_signature(given: ReduceInput, axis: int, detail: str | None) -> Signature:
    """The call that reduces the array and splits it along the axis."""
    return given.signature("reduce_scatter", detail=detail_of(f"axis={axis}", detail))
