"""Batches: nests of arrays (NumPy, torch, anything with a shape) that have one length on axis 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.cuda.interface import is_torch
from strategies.core import nest


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


def concatenate(batches: Sequence[Any]) -> Any:
    """One batch from several of the same structure, concatenated along axis 0."""
    if len(batches) == 1:
        return batches[0]
    columns = zip(*map(nest.leaves, batches), strict=True)
    return nest.pack_like(batches[0], [_concatenate_arrays(column) for column in columns])


def _concatenate_arrays(arrays: Sequence[Any]) -> Any:
    if is_torch(arrays[0]):
        import torch

        return torch.cat(arrays)
    return np.concatenate(arrays)
