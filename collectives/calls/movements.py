"""What movements take and give: arrays that are sent, joined or cut."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.kinds import (
    Output,
    after_reading,
    assign,
    check_same_memory,
    copied,
    empty,
    flat,
    given_output,
    is_device,
    is_writeable,
    like,
    packed,
    to_array,
)
from collectives.arrays.tensors import refuse_false_gradient, refuse_lost_gradient
from collectives.calls.arguments import Rows, received_as, split_rows
from collectives.consistency.signature import ANY_LENGTH, Signature, dtype_name
from collectives.cuda.runtime import filled
from collectives.errors import in_step
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array


def broadcast_output(given: Array, array: Any, *, on_root: bool) -> Output:
    """The buffer of a broadcast of `array`, which is `given` as NumPy or CuPy sees it.

    Raises ValueError or TypeError where this rank's array can't be written and it isn't the root.
    """
    refuse_false_gradient(array, "array")
    if on_root:
        # A schedule may write into the root's buffer what is there already.
        buffer = flat(given if is_writeable(given, array) else copied(given))
        return Output(buffer, lambda: after_reading(array))
    return given_output(array, given.shape, given.dtype, name="array")


def broadcast_signature(given: Array, root: int, detail: str | None) -> Signature:
    """The call that sends the root's array."""
    dtype = dtype_name(given.dtype)
    return Signature("broadcast", None, dtype, given.shape, root, detail, given.nbytes)


def signature_of(collective: str, rows: Rows, root: int | None, detail: str | None) -> Signature:
    """The call that joins rows, whose number each rank chooses."""
    shape, dtype, nbytes = rows.shape(ANY_LENGTH), dtype_name(rows.dtype), rows.flat.nbytes
    return Signature(collective, None, dtype, shape, root, detail, nbytes)


def rows_of(out: Any, rows: Rows) -> int:
    """How many rows `out` holds; ValueError or TypeError where it can't hold any such."""
    view = to_array(out, "out")
    given_output(out, view.shape, view.dtype)
    shape, needed = view.shape, rows.shape(ANY_LENGTH)
    count = shape[rows.axis] if len(shape) == len(needed) else 0
    if shape != tuple(rows.shape(count)):
        given = ", ".join("n" if each == ANY_LENGTH else str(each) for each in needed)
        text = f"({given}{',' * (len(needed) == 1)}) for n rows of all ranks together"
        raise ValueError(f"out has shape {shape}: must have the result's, {text}")
    rows.output(out, count, rows.dtype, out)
    return count


class Scattered(NamedTuple):
    """What the other ranks must know of the root's array."""

    rows: int
    rest: tuple[int, ...]
    axis: int
    dtype: np.dtype[Any]
    on_gpu: bool

    def lengths(self, size: int) -> list[int]:
        """The elements that each rank gets."""
        elements = math.prod(self.rest)
        return [count * elements for count in split_rows(self.rows, size)]

    def becomes_result(self, out: Any) -> bool:
        """Whether memory with this rank's elements is the result, but for its shape and library."""
        return out is None and not self.axis

    def deliver(
        self, engine: Engine, block: Array, array: Any, out: Any, *, copies: bool = True
    ) -> Any:
        """This rank's elements, in `out` or of the library of the array that it gave.

        Without `out` a copy, unless `copies` is false.
        """
        shaped = block.reshape(split_rows(self.rows, engine.size)[engine.rank], *self.rest)
        if self.axis:
            shaped = np.moveaxis(shaped, 0, self.axis)
        if out is None:
            block = copied(shaped) if copies else packed(shaped)
            return received_as(like(array), block, "scatter: the root")
        try:
            output = given_output(out, shaped.shape, self.dtype)
            if not self.on_gpu:
                check_same_memory(block, output)
        except (TypeError, ValueError) as error:
            raise in_step(error) from None
        # The block of an array on a GPU may lie on the host here.
        if is_device(output.buffer) and not is_device(block):
            filled(output.buffer, shaped.reshape(-1))
        else:
            assign(output.buffer.reshape(shaped.shape), shaped)
        return output.deliver()


def look_at(engine: Engine, array: Any, axis: int) -> tuple[Scattered, Rows]:
    """The root's array. Raises where it can't be scattered."""
    if array is None:
        raise TypeError(f"array is None on the root, rank {engine.rank}: must be what is scattered")
    rows = Rows(to_array(array), axis)
    refuse_lost_gradient(array, "array")
    on_gpu = is_device(rows.flat)
    if on_gpu and engine.devices is None:
        # The other ranks have started the call where arrays on the CPU are moved.
        raise TypeError("scatter_async: the array lies on a GPU: must lie on the CPU")
    return Scattered(rows.count, rows.rest, rows.axis, rows.dtype, on_gpu), rows


def scattered(
    engine: Engine,
    found: Scattered,
    given: Array | None,
    root: int,
    algorithm: str | None,
    array: Any,
    out: Any,
) -> Any:
    """As `Scattered.deliver`, of the elements `given`, which are on the root alone."""
    lengths, devices = found.lengths(engine.size), engine.devices
    length, new = lengths[engine.rank], found.becomes_result(out)
    if given is not None and is_device(given):
        block = empty(length, found.dtype, given)
    elif found.on_gpu and devices is not None and not devices.over_host:
        block = devices.room(length, found.dtype)
    else:
        block = np.empty(length, found.dtype) if new else engine.work(length, found.dtype)
    engine.run("scatter", given, block, lengths=lengths, root=root, algorithm=algorithm)
    return found.deliver(engine, block, array, out, copies=not (new or is_device(block)))
