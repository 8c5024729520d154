"""Values that replicas hold: with one process per replica, one value here.

Where TensorFlow hands out a container with a value for each replica, this package hands out the
value of this process's replica itself. The containers are for programs that make them, or ask for
them by `isinstance`: what is given to `run`, `reduce`, `gather` and the others is unwrapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.kinds import to_numpy
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.cuda.runtime import on_gpu
from strategies.core import nest


class DistributedValues:
    """Base of the containers, as `tf.distribute.DistributedValues`. `values` is a tuple of one."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = tuple(values)
        if len(self.values) != 1:
            raise ValueError(
                f"values has {len(self.values)} entries: must have one, since a process is one"
                " replica"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.values[0]!r})"


class PerReplica(DistributedValues):
    """A value that differs from replica to replica: this one's."""


class Mirrored(DistributedValues):
    """A value that is the same on all replicas."""


def local(value: Any) -> Any:
    """A nest with this replica's values in place of their containers; else the very same object."""
    if not any(isinstance(leaf, DistributedValues) for leaf in nest.leaves(value)):
        return value
    return nest.map_leaves(_unwrapped, value)


def _unwrapped(leaf: Any) -> Any:
    return leaf.values[0] if isinstance(leaf, DistributedValues) else leaf


def as_array(value: Any, name: str, dtype: Any = None) -> NDArray[Any]:
    """What was given as `name`, as NumPy, sharing its memory where that is possible.

    Tensors of torch keep their storages resizable, which NumPy's own way to them would end. Raises
    ValueError for one that requires grad, TypeError for what lies on another device than the CPU.
    """
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return np.asarray(value, dtype)
    refuse_lost_gradient(value, name)
    if on_gpu(value):
        kind = type(value).__name__
        raise TypeError(f"{name} is a {kind} on a GPU: must lie on the CPU here")
    return np.asarray(to_numpy(value, name), dtype)
