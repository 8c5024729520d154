"""Batches as messages: a small picklable header and a list of arrays; digests of batches.

The arrays are sent from their own memory. The header has placeholders for them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.arrays.kinds import to_numpy
from collectives.arrays.tensors import to_torch
from collectives.cuda.interface import is_torch
from strategies.core import nest
from strategies.core.values import Array


@dataclass(frozen=True)
class _Placeholder:
    """An array's index in the list of arrays, and whether it is a torch tensor."""

    index: int
    tensor: bool


def pack(batch: Any) -> tuple[Any, list[Array]]:
    """The header, and copies of the arrays in C order.

    Copies, since a dataset may reuse the same array for every batch. Everything that is neither
    a NumPy array of fixed-size elements nor a torch tensor on the CPU stays in the header.
    """
    arrays: list[Array] = []

    def replace(leaf: Any) -> Any:
        tensor = is_torch(leaf)
        if not tensor and not (type(leaf) is np.ndarray and not leaf.dtype.hasobject):
            return leaf
        arrays.append(np.array(to_numpy(leaf) if tensor else leaf, order="C"))
        return _Placeholder(len(arrays) - 1, tensor)

    return nest.map_leaves(replace, batch), arrays


def unpack(header: Any, arrays: list[Array]) -> Any:
    """The batch of a header and its arrays, which are not copied."""

    def restore(leaf: Any) -> Any:
        if not isinstance(leaf, _Placeholder):
            return leaf
        array = arrays[leaf.index]
        if not leaf.tensor:
            return array
        import torch  # noqa: F401 -- to_torch needs it loaded; the sender had it

        return to_torch(array)

    return nest.map_leaves(restore, header)


def digest_of(batch: Any) -> str:
    """A digest of the batch's NumPy arrays and torch tensors; other leaves are ignored."""
    digest = hashlib.blake2b(digest_size=16)
    for array in pack(batch)[1]:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
