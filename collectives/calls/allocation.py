"""Allocation of memory that the node's ranks share: one array per rank, or one for all ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.calls import Operation
from collectives.calls.objects import numbers_of_all
from collectives.consistency.signature import Signature, dtype_name
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.waiting.wait_policy import warn_once


def empty(shape: int | Sequence[int], dtype: Any) -> Operation:
    """A registered array; an ordinary one if there is no shared memory."""
    dimensions, kind, nbytes = _checked(shape, dtype)

    def perform(engine: Engine) -> Array:
        if engine.devices is not None and engine.devices.gpus_requested:
            room: Array = engine.devices.room(math.prod(dimensions), kind).reshape(dimensions)
            return room
        block = None
        if engine.node is not None and nbytes:
            block = engine.node.pool.allocate(nbytes)
            if block is None and engine.node.steps.rank == 0:
                warn_once(
                    "no memory is left that ranks can share (/dev/shm) for some registered arrays:"
                    " they are ordinary ones"
                )
        if block is None:
            return np.empty(dimensions, kind)
        array: Array = block.view(kind).reshape(dimensions)
        return array

    return Operation(Signature("empty", None, dtype_name(kind), dimensions, nbytes=nbytes), perform)


def zeros(shape: int | Sequence[int], dtype: Any) -> Operation:
    """Like `empty`, filled with zeros."""
    unfilled = empty(shape, dtype)

    def perform(engine: Engine) -> Array:
        array: Array = unfilled.run(engine)
        array.reshape(-1).view(np.uint8)[...] = 0
        return array

    return unfilled._replace(run=perform)


def empty_shared(shape: int | Sequence[int], dtype: Any) -> Operation:
    """One array for all ranks of a node; None on every rank if a node has no memory for it."""
    dimensions, kind, nbytes = _checked(shape, dtype)

    def perform(engine: Engine) -> Array | None:
        if not nbytes or max(engine.layout.local_sizes) == 1:
            return np.empty(dimensions, kind)
        block = None if engine.node is None else engine.node.common.allocate(nbytes)
        if not all(there for there, _ in numbers_of_all(engine, int(block is not None))):
            return None
        assert block is not None
        array: Array = block.view(kind).reshape(dimensions)
        return array

    signature = Signature("empty_shared", None, dtype_name(kind), dimensions, nbytes=nbytes)
    return Operation(signature, perform)


def _checked(shape: int | Sequence[int], dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Lengths, dtype and bytes; ValueError or TypeError if the array is not possible."""
    dimensions, kind = _dimensions(shape), dtype_of(dtype)
    if kind.hasobject or kind.subdtype or not kind.itemsize:
        raise TypeError(f"dtype={kind}: a registered array holds fixed-size numbers")
    # Raises MemoryError for impossible sizes before the ranks synchronize.
    np.empty(dimensions, kind)
    return dimensions, kind, math.prod(dimensions) * kind.itemsize


def dtype_of(given: Any) -> np.dtype[Any]:
    """The dtype that is meant; TypeError for anything else."""
    try:
        found: np.dtype[Any] = np.dtype(given)
    except TypeError as error:
        raise TypeError(
            f"dtype={given!r}: must be a dtype of NumPy, or its name ({error})"
        ) from None
    return found


def _dimensions(shape: int | Sequence[int]) -> tuple[int, ...]:
    given = shape if isinstance(shape, Sequence) else (shape,)
    try:
        dimensions = tuple(operator.index(length) for length in given)
    except TypeError:
        raise TypeError(f"shape={shape!r}: must be an integer, or a sequence of them") from None
    if any(length < 0 for length in dimensions):
        raise ValueError(f"shape={shape!r}: lengths must not be negative")
    return dimensions
