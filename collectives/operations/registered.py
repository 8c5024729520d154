"""Registered arrays, which the node's ranks can all reach."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.engine import Engine
from collectives.operations import Operation
from collectives.reduction import Array
from collectives.signature import Signature, dtype_name
from collectives.waiting import log


def empty(shape: int | Sequence[int], dtype: Any) -> Operation:
    """An array in the node's memory; an ordinary one where there is no such memory."""
    dimensions = _dimensions(shape)
    kind = np.dtype(dtype)
    if kind.hasobject or not kind.itemsize:
        raise TypeError(f"dtype={kind}: a registered array holds fixed-size numbers")
    nbytes = math.prod(dimensions) * kind.itemsize
    # Where there is never so much memory, here is where that is said: before the ranks meet.
    np.empty(dimensions, kind)

    def perform(engine: Engine) -> Array:
        block = None
        if engine.node is not None and nbytes:
            block = engine.node.arena.allocate(nbytes)
            if block is None:
                log.warning("no shared memory is left for %d bytes: the array is ordinary", nbytes)
        if block is None:
            return np.empty(dimensions, kind)
        array: Array = block.view(kind).reshape(dimensions)
        return array

    return Operation(Signature("empty", None, dtype_name(kind), dimensions, nbytes=nbytes), perform)


def _dimensions(shape: int | Sequence[int]) -> tuple[int, ...]:
    given = shape if isinstance(shape, Sequence) else (shape,)
    dimensions = tuple(operator.index(length) for length in given)
    if any(length < 0 for length in dimensions):
        raise ValueError(f"shape={shape!r}: lengths must not be negative")
    return dimensions
