"""A batch: a nest of arrays (NumPy's, torch's, anything with a shape) of one length on axis 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.core import nest


def length_of(batch: Any) -> int:
    """The number of examples. ValueError where arrays lack an axis 0 or their lengths differ."""
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
    """The examples from `start` to `stop`: views, of the arrays' own kind."""
    return nest.map_leaves(lambda leaf: leaf[start:stop], batch)


def contiguous_part(batch: Any, rank: int, size: int) -> Any:
    """The rank's part, of ⌈n/size⌉ examples or what is left: TensorFlow's AutoShardPolicy.DATA."""
    longest = -(-length_of(batch) // size)
    return part_of(batch, rank * longest, (rank + 1) * longest)


def joined(parts: Sequence[Any]) -> Any:
    """Batches of one structure, one after the other as one."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*map(nest.leaves, parts), strict=True)
    return nest.pack_like(parts[0], [_concatenated(column) for column in columns])


def _concatenated(arrays: Sequence[Any]) -> Any:
    if is_torch(arrays[0]):
        import torch

        return torch.cat(arrays)
    return np.concatenate(arrays)


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor; torch isn't imported for the question."""
    return any(kind.__module__ == "torch" for kind in type(array).__mro__)
