"""Batches: nests of arrays (NumPy, torch, anything with a shape) that have one length on axis 0.

As messages they are a small picklable header, with placeholders, and a list of arrays, which are
sent from their own memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.arrays.kinds import to_numpy
from collectives.arrays.tensors import to_torch
from collectives.cuda.interface import is_torch
from strategies.core import nest
from strategies.core.values import Array


def length_of(batch: Any) -> int:
    """The number of examples. ValueError where an array has no axis 0 or the lengths differ."""
    lengths = {leaf.shape[0] for leaf in arrays_of(batch)}
    if len(lengths) != 1:
        raise ValueError(
            f"a batch has arrays of lengths {sorted(lengths)}: must be of one length on axis 0"
        )
    return int(lengths.pop())


def arrays_of(batch: Any) -> list[Any]:
    """The arrays of a batch. ValueError where one has no axis 0."""
    leaves = nest.leaves(batch)
    if not all(getattr(leaf, "shape", ()) and hasattr(leaf, "dtype") for leaf in leaves):
        kinds = [f"{type(leaf).__name__} of shape {np.shape(leaf)}" for leaf in leaves]
        raise ValueError(f"a batch has {', '.join(kinds)}: must be arrays with an axis 0")
    return leaves


def part_of(batch: Any, start: int, stop: int) -> Any:
    """The examples from `start` to `stop`, as views."""
    return nest.map_leaves(lambda leaf: leaf[start:stop], batch)


def contiguous_part(batch: Any, rank: int, size: int) -> Any:
    """The rank's part, ⌈n/size⌉ examples or what is left: TensorFlow's AutoShardPolicy.DATA."""
    longest = -(-length_of(batch) // size)
    return part_of(batch, rank * longest, (rank + 1) * longest)


def copied(batch: Any) -> Any:
    """The batch with arrays of its own: a dataset may reuse the same array for every batch.

    Tensors in pinned memory and on GPUs, and those of which gradients are wanted, are not copied.
    """
    return nest.map_leaves(_copied_array, batch)


def _copied_array(leaf: Any) -> Any:
    if is_torch(leaf):
        plain = leaf.device.type == "cpu" and not leaf.requires_grad and not leaf.is_pinned()
        return leaf.clone() if plain else leaf
    return leaf.copy(order="K") if isinstance(leaf, np.ndarray) else leaf


def concatenate(batches: Sequence[Any]) -> Any:
    """One batch from several, along axis 0. ValueError where their outermost keys differ."""
    if len(batches) == 1:
        return batches[0]
    columns = columns_of(batches, "batches")
    return nest.pack_like(batches[0], [_concatenate_arrays(column) for column in columns])


def columns_of(rows: Sequence[Any], what: str) -> Iterator[tuple[Any, ...]]:
    """The leaves at each place of several nests; ValueError where the outermost keys differ."""
    first, *others = (row.keys() if isinstance(row, Mapping) else () for row in rows)
    for other in others:
        if other != first:
            raise ValueError(f"{what} have different keys: {list(first)} and {list(other)}")
    return zip(*map(nest.leaves, rows), strict=True)


def _concatenate_arrays(arrays: Sequence[Any]) -> Any:
    if is_torch(arrays[0]):
        import torch

        return torch.cat(arrays)
    masked = any(isinstance(each, np.ma.MaskedArray) for each in arrays)
    return (np.ma if masked else np).concatenate(arrays)


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
    """A digest of the batch's NumPy arrays and torch tensors; other leaves are ignored.

    "" where the processor can't read a tensor, such as one on a GPU.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        arrays = pack(batch)[1]
    except TypeError:
        return ""
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
