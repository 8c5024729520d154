"""Functions and values as bytes that another process can read: pickles by cloudpickle.

What belongs to a place, such as a variable, is packed as a reference, which the reader resolves to
its own: `References` says how.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Protocol, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

Packed: TypeAlias = list[NDArray[np.uint8]]
"""An object in arrays of bytes."""


class References(Protocol):
    """What travels by name."""

    def name(self, thing: Any) -> Any:
        """A picklable name of the thing; None for what is to be packed itself."""

    def resolve(self, name: Any) -> Any:
        """The reader's own thing of that name."""


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any, references: References, **options: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, **options)
        self._references = references

    def persistent_id(self, thing: Any) -> Any:
        return self._references.name(thing)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: Any, references: References, **options: Any) -> None:
        super().__init__(file, **options)
        self._references = references

    def persistent_load(self, name: Any) -> Any:
        return self._references.resolve(name)


def pack(thing: Any, references: References) -> Packed:
    """What can be sent; after the first array follow the contiguous ones, uncopied.

    Raises what pickle raises, and TypeError for most of what can't be packed.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Packer(file, references, buffer_callback=buffers.append).dump(thing)
    return [
        np.frombuffer(part, np.uint8)
        for part in (file.getbuffer(), *(each.raw() for each in buffers))
    ]


def pack_copy(thing: Any, references: References) -> Packed:
    """As `pack`, with copies of all arrays: nothing that changes later changes them."""
    first, *arrays = pack(thing, references)
    return [first, *(array.copy() for array in arrays)]


def unpack(arrays: Packed, references: References) -> Any:
    """What was packed, in the memory of the arrays after the first one."""
    first, *buffers = arrays
    return _Unpacker(io.BytesIO(first.data), references, buffers=buffers).load()
