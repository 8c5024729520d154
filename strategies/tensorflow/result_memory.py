"""Memory for results that become tensors, for every step the same.

Fresh memory costs as much as a reduction of half a megabyte: the kernel clears each page. And
TensorFlow copies an array that does not begin where its own tensors do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np

from collectives.caching import LRU
from collectives.messaging.buffers import ReusedArray
from strategies.core.values import Array

ALIGNMENT = 64
"""Of a tensor's memory, in bytes."""
LEAST_BYTES = 4096
"""Smaller arrays have memory of their own each time."""
_LISTS_KEPT = 16

Kinds = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


class ResultMemory:
    """Arrays for results; memory is given out again once TensorFlow has freed the tensor in it."""

    def __init__(self) -> None:
        self._known: LRU[Kinds, list[Callable[[], Array]]] = LRU(_LISTS_KEPT)

    def like(self, arrays: Sequence[Array]) -> list[Array]:
        """Arrays of the same shapes and dtypes, without content."""
        kinds = tuple((each.shape, each.dtype) for each in arrays)
        takes = self._known.recall(kinds)
        if takes is None:
            takes = self._known.put(kinds, list(starmap(_taking, kinds)))
        return [take() for take in takes]


def _taking(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Callable[[], Array]:
    """What gives an array of that kind at each call."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST_BYTES:
        return partial(np.empty, shape, dtype)
    # Each array by itself: a variable that takes over one tensor's memory would keep all of it.
    return ReusedArray(shape, dtype, ALIGNMENT).take
