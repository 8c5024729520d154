"""Which parameter server holds which variable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from strategies.cluster.spec import ClusterSpec, Jobs, Task
from strategies.parameter_server.partitioners import div_lengths

PartitionFunction = Callable[..., Sequence[int]]


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


def lengths_of_parts(
    partitioner: PartitionFunction | None, shape: tuple[int, ...], dtype: Any
) -> list[int] | None:
    """How many rows each part of a variable has; None where it stays whole.

    A single number, or a variable without rows, is never split. Raises ValueError for a
    partitioner that splits along another axis than 0.
    """
    if partitioner is None or not shape or not shape[0]:
        return None
    parts = partitioner(shape=shape, dtype=dtype)
    usable = isinstance(parts, list | tuple) and len(parts) == len(shape)
    if not usable or parts[0] < 1 or any(part != 1 for part in parts[1:]):
        raise ValueError(
            f"variable_partitioner gave {parts!r} for a variable of shape {shape}: must be a list"
            " with an entry for each axis, from 1 up for the first one, and 1 for all others"
        )
    count = min(parts[0], shape[0])
    return None if count == 1 else div_lengths(shape[0], count)


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
