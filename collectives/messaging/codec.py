"""A message of an object and arrays as byte buffers, and back."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.kinds import flat, to_numpy
from collectives.reductions.reduction import Array
from collectives.transports.base import Bytes


class Message(NamedTuple):
    """A message that has arrived: copies of its object and its arrays, which can be written."""

    source: int
    header: Any
    arrays: list[Array]


class IncomingMessage(NamedTuple):
    """A message that is yet to be read."""

    source: int
    buffers: list[Array]

    @classmethod
    def copied(cls, source: int, buffers: Sequence[Bytes]) -> IncomingMessage:
        """With memory of its own."""
        return cls(source, [np.array(buffer, np.uint8) for buffer in buffers])


def write(header: Any, arrays: Iterable[Any]) -> list[Bytes]:
    """The buffers: the object with the arrays' dtypes and shapes, then each array's elements.

    The memory is the arrays' own where they are contiguous.
    """
    given = [_checked(array, f"arrays[{place}]") for place, array in enumerate(arrays)]
    kinds = [(_named(array.dtype), array.shape) for array in given]
    content = pickle.dumps((header, kinds), pickle.HIGHEST_PROTOCOL)
    return [memoryview(content), *(flat(array).view(np.uint8).data for array in given)]


def read(incoming: IncomingMessage) -> Message:
    """The arrays lie in the buffers' memory."""
    content, *buffers = incoming.buffers
    header, kinds = pickle.loads(content.data)
    arrays: list[Array] = [
        np.ndarray(shape, dtype, buffer.data)
        for (dtype, shape), buffer in zip(kinds, buffers, strict=True)
    ]
    return Message(incoming.source, header, arrays)


def _named(dtype: np.dtype[Any]) -> str | np.dtype[Any]:
    """The name, which pickles in a tenth of the time, for dtypes that it determines."""
    return dtype if dtype.kind == "V" else dtype.str


def _checked(array: Any, argument: str) -> Array:
    """As NumPy; TypeError for what has no elements of a fixed size."""
    if type(array) is np.ndarray and array.dtype.kind in "SUMm" and array.dtype.itemsize:
        return array
    return to_numpy(array, argument)
