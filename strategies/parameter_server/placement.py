"""Into how many parts a variable is split, and which parameter server holds which part.

The partitioners are those of `tf.distribute.experimental`. All of them split along one axis, by
default 0. Called as in TensorFlow: `partitioner(shape=(10, 3), dtype=numpy.float32)` gives the
number of parts along each axis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from strategies.cluster.spec import ClusterSpec, Jobs, Task
from strategies.core.values import whole_number

PartitionFunction = Callable[..., Sequence[int]]


class Partitioner(ABC):
    """A function from a shape and a dtype to the number of parts along each axis."""

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """The numbers of parts: 1, but for the axis. Raises ValueError for an axis not there."""
        if not 0 <= axis < len(shape):
            raise ValueError(f"axis={axis}: the shape {tuple(shape)} has {len(shape)} axes")
        parts = [1] * len(shape)
        parts[axis] = self.count(tuple(shape), np.dtype(dtype), axis)
        return parts

    @abstractmethod
    def count(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int) -> int:
        """The number of parts along the axis."""


class FixedShardsPartitioner(Partitioner):
    """Always `num_shards` parts, or as many as there are rows where those are fewer.

    As `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = whole_number("num_shards", num_shards, 1)

    def count(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int) -> int:
        """The smaller of the two numbers."""
        return min(self.num_shards, shape[axis])


class MinSizePartitioner(Partitioner):
    """⌈bytes of the variable ÷ `min_shard_bytes`⌉ parts, up to `max_shards` and the rows.

    As `tf.distribute.experimental.partitioners.MinSizePartitioner`: parts may be smaller than
    `min_shard_bytes`. 6 rows of 4 bytes with a minimum of 7 give 4 parts, of 8, 8, 4 and 4 bytes.
    Each element of a variable of strings counts as `bytes_per_string`.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self.min_shard_bytes = whole_number("min_shard_bytes", min_shard_bytes, 1)
        self.max_shards = whole_number("max_shards", max_shards, 1)
        self.bytes_per_string = whole_number("bytes_per_string", bytes_per_string, 1)

    def count(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int) -> int:
        """From 1 to the number of rows, or to `max_shards`."""
        total = math.prod(shape) * element_bytes(dtype, self.bytes_per_string)
        wanted = -(-total // self.min_shard_bytes)
        return max(1, min(shape[axis], self.max_shards, wanted))


class MaxSizePartitioner(Partitioner):
    """As few parts as keep each at `max_shard_bytes` or below, but never below one row.

    As `tf.distribute.experimental.partitioners.MaxSizePartitioner`. Where `max_shards` is given,
    it goes before the size.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self.max_shard_bytes = whole_number("max_shard_bytes", max_shard_bytes, 1)
        self.max_shards = None if max_shards is None else whole_number("max_shards", max_shards, 1)
        self.bytes_per_string = whole_number("bytes_per_string", bytes_per_string, 1)

    def count(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int) -> int:
        """The rows divided by the rows that fit into a part."""
        elements_of_a_row = math.prod(shape[:axis] + shape[axis + 1 :])
        row_bytes = elements_of_a_row * element_bytes(dtype, self.bytes_per_string)
        rows_of_a_part = max(1, self.max_shard_bytes // row_bytes) if row_bytes else shape[axis]
        parts = -(-shape[axis] // max(1, rows_of_a_part))
        return parts if self.max_shards is None else min(parts, self.max_shards)


def element_bytes(dtype: np.dtype[Any], bytes_per_string: int) -> int:
    """The size that an element counts for."""
    return bytes_per_string if dtype.kind in "SUTO" else dtype.itemsize


class RoundRobin:
    """Deals shards to servers: one counter for all variables, in the order of creation."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self._dealt = 0
        self._colocated: int | None = None

    def next(self) -> int:
        """The number of the server that gets the next shard."""
        if self._colocated is not None:
            return self._colocated
        self._dealt += 1
        return (self._dealt - 1) % self.servers

    @property
    def colocating(self) -> bool:
        """Whether shards are put beside another variable, rather than dealt."""
        return self._colocated is not None

    @contextmanager
    def colocate_with(self, server: int) -> Iterator[None]:
        """Put what is created meanwhile onto this server, uncounted."""
        before, self._colocated = self._colocated, server
        try:
            yield
        finally:
            self._colocated = before


def count_of_parts(
    partitioner: PartitionFunction | None, shape: tuple[int, ...], dtype: Any
) -> int:
    """Into how many parts a variable is split, along its rows.

    A single number, or a variable without rows, is never split. Raises ValueError for a
    partitioner that splits along another axis than 0.
    """
    if partitioner is None or not shape or not shape[0]:
        return 1
    parts = partitioner(shape=shape, dtype=dtype)
    usable = isinstance(parts, list | tuple) and len(parts) == len(shape)
    if not usable or parts[0] < 1 or any(part != 1 for part in parts[1:]):
        raise ValueError(
            f"variable_partitioner gave {parts!r} for a variable of shape {shape}: must be a list"
            " with an entry for each axis, from 1 up for the first one, and 1 for all others"
        )
    return int(min(parts[0], shape[0]))


def replica_device_setter(
    ps_tasks: int = 0, *, cluster: ClusterSpec | Jobs | None = None
) -> Callable[[], Task] | None:
    """A function that gives the ps task of the next variable, in turn; None where there is no ps.

    As `tf.compat.v1.train.replica_device_setter`. The tasks are the `ps_tasks` first ones, or
    those of the cluster's job "ps". Raises ValueError for a negative number.
    """
    if ps_tasks < 0:
        raise ValueError(f"ps_tasks={ps_tasks!r}: must not be negative")
    spec = None if cluster is None else ClusterSpec(cluster)
    if spec is None:
        indices = list(range(ps_tasks))
    else:
        indices = spec.task_indices("ps") if "ps" in spec.jobs else []
    if not indices:
        return None
    dealer = RoundRobin(len(indices))
    return lambda: Task("ps", indices[dealer.next()])
