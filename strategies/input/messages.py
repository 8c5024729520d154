"""A batch as a small object and arrays, as it travels between ranks, and back.

Arrays and tensors are sent from where they lie, never pickled; only their places are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.kinds import to_numpy
from collectives.arrays.tensors import to_torch
from collectives.cuda.interface import is_torch
from strategies.core import nest


@dataclass(frozen=True)
class _Place:
    """Stands for an array in a nest."""

    number: int
    tensor: bool


def pack(batch: Any) -> tuple[Any, list[NDArray[Any]]]:
    """The nest with its arrays' places, and copies of the arrays.

    Copies, since a dataset may fill the same array anew for every batch. Everything that is neither
    a NumPy array of fixed-size elements nor a torch tensor on the CPU stays in the nest.
    """
    arrays: list[NDArray[Any]] = []

    def placed(leaf: Any) -> Any:
        tensor = is_torch(leaf)
        if not tensor and not (type(leaf) is np.ndarray and not leaf.dtype.hasobject):
            return leaf
        arrays.append(np.array(to_numpy(leaf) if tensor else leaf, order="C"))
        return _Place(len(arrays) - 1, tensor)

    return nest.map_leaves(placed, batch), arrays


def unpack(header: Any, arrays: list[NDArray[Any]]) -> Any:
    """The batch, whose arrays are those given."""

    def found(leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        array = arrays[leaf.number]
        if not leaf.tensor:
            return array
        import torch  # noqa: F401 -- the batch was made of tensors, on a rank that has it

        return to_torch(array)

    return nest.map_leaves(found, header)
