"""Containers of the replicas' values: one process is one replica, so each has one value.

Where TensorFlow returns a container with a value for each replica, this package returns the value
itself. The containers are for programs that make them or test for them by `isinstance`; `run`,
`reduce`, `gather` and the others unwrap them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.kinds import to_array, to_numpy
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.cuda.runtime import cuda, fetched, filled, on_gpu
from strategies.core import nest

Array: TypeAlias = NDArray[Any]

NOTHING = (
    "a value of the replicas is None: must be an array or a number. Does the function that is given"
    " to `run` return what is reduced or gathered?"
)
"""The text of the TypeError for such a value."""


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
    return nest.map_leaves(
        lambda leaf: leaf.values[0] if isinstance(leaf, DistributedValues) else leaf, value
    )


def whole_number(name: str, value: Any, least: int) -> int:
    """The argument `name` as an int from `least` up; else TypeError (a bool, too) or ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    wrong = number is None or isinstance(value, bool)
    if number is None or wrong or number < least:
        kind = TypeError if wrong else ValueError
        raise kind(f"{name}={value!r}: must be an integer of at least {least}")
    return number


def as_array(value: Any, name: str, dtype: Any = None, *, gpu: bool = False) -> Array:
    """The argument `name` as a NumPy array, which shares its memory where possible.

    A torch tensor is converted by DLPack: NumPy's own conversion would fix its storage's size.
    `gpu`: as a device array on the current GPU, to which a value of the host is copied.
    Raises ValueError for one that requires grad, TypeError for an array on another device.
    """
    if gpu:
        return _on_gpu(value, name, dtype)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost")
    if not hasattr(value, "__dlpack__") or (isinstance(value, np.ndarray) and not on_gpu(value)):
        return np.asarray(value, dtype)
    refuse_lost_gradient(value, name)
    if on_gpu(value):
        kind = type(value).__name__
        raise TypeError(f"{name} is a {kind} on a GPU: must lie on the CPU here")
    return np.asarray(to_numpy(value, name), dtype)


def _on_gpu(value: Any, name: str, dtype: Any) -> Array:
    if on_gpu(value):
        refuse_lost_gradient(value, name)
        return cast(to_array(value, name), dtype)
    given = as_array(value, name, dtype)
    made: Array = cuda().empty(given.shape, given.dtype)
    filled(made.reshape(-1), given.reshape(-1))
    return made


def cast(array: Any, dtype: Any) -> Array:
    """The array in the dtype (None: its own), where it lies."""
    if not on_gpu(array):
        return np.asarray(array, dtype)
    there: Array = array if dtype is None else array.astype(dtype, copy=False)
    return there


def dtype_of_sum(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of sums: float64 for integers and bool, float32 for 16-bit floats.

    Sums in narrower dtypes overflow.
    """
    if dtype.kind in "biu":
        return np.dtype(np.float64)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def on_host(array: Any) -> Array:
    """A NumPy array with the elements of one on any device."""
    if not on_gpu(array):
        return np.asarray(array)
    flat = array.copy().reshape(-1)
    return fetched(flat).reshape(array.shape)


def content(leaf: Any) -> Any:
    """The value of a variable, which is known by its `read_value`; anything else as it is."""
    return leaf.read_value() if hasattr(leaf, "read_value") else leaf
