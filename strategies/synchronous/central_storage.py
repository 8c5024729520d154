"""CentralStorageStrategy: synchronous training with one copy of every variable on each node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import BackendUnavailableError, Communicator
from strategies.base.membership import join_cluster
from strategies.base.strategy import Strategy
from strategies.cluster.tf_config import validate_for_collective_training
from strategies.core.indexed_slices import Gradient
from strategies.core.same_error import call_on_all, raise_on_all
from strategies.core.storage import Change, LocalStorage, Storage, assign
from strategies.core.values import Array
from strategies.core.world import nccl_problem, parse_devices
from strategies.optimizers import Optimizer
from strategies.variables.variable import Variable

_CPU = re.compile(r"(.*/)?(device:)?cpu(:\d+)?", re.IGNORECASE)


class CentralStorageStrategy(Strategy):
    """One copy of every variable per node, in memory that the node's ranks share.

    As `tf.distribute.experimental.CentralStorageStrategy`; the ranks are the replicas, and there
    may be several nodes. All ranks read a variable in place. In a step, gradients are summed over
    all ranks (fused) and each rank of a node updates a part of the copy and of the optimizer's
    slots, of which a node has one copy as well. The sums have the same bits everywhere, so nodes
    don't exchange the new values. A barrier ends the step: no rank reads old values. Results are
    MultiWorkerMirroredStrategy's, to the bit. Where the ranks of some node share no memory, each
    rank has a copy of its own.

    The cluster is found as by MultiWorkerMirroredStrategy. `compute_devices` has a name for each
    rank of the node, and `parameter_device` names the CPU, the only device that this version keeps
    variables on: ValueError on every rank otherwise, BackendUnavailableError where a rank names a
    GPU and has none. Making one is collective.
    """

    variables_on_gpus = False

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        self.membership = join_cluster(communicator, None, validate_for_collective_training)
        group = self.membership.group
        call_on_all(
            group,
            "CentralStorageStrategy",
            lambda: _check_devices(group, compute_devices, parameter_device),
        )
        super().__init__(
            group,
            cluster_resolver=self.membership.resolver,
            is_chief=self.membership.place.is_chief,
        )

    def store(self, value: Array, what: str) -> Storage:
        """In the node's memory. Collective; raises as `mirror`."""
        first = self.mirror(value, what)
        stored = shared_zeros(self.communicator, first.shape, first.dtype)
        if stored is None:
            return LocalStorage(first)
        stored.change(assign, first)
        return stored

    def apply_gradients(
        self, optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> None:
        """Change this rank's part of each variable. Collective.

        The sums are complete only when all have given theirs, and so have read the old values.
        """
        super().apply_gradients(optimizer, gradients, variables)
        self.communicator.barrier()


class SharedStorage(Storage):
    """An array in the memory of a node, which all its ranks read; each updates a part of it."""

    changes_together = True

    def __init__(self, communicator: Communicator, array: Array) -> None:
        """`array` is one that `communicator.empty_shared` gave."""
        self._communicator, self._array = communicator, array
        self._readable = array.view()
        self._readable.flags.writeable = False
        self.shape, self.dtype = array.shape, array.dtype
        place, ranks = communicator.local_rank, communicator.local_size
        self._part = slice(array.size * place // ranks, array.size * (place + 1) // ranks)

    def view(self) -> Array:
        """The array itself, read-only."""
        return self._readable

    def change(self, change: Change, *operands: Any) -> None:
        """Change the array, by one rank of the node, once all have read the old value.

        Raises on every rank what the change raises.
        """
        self._communicator.barrier()
        failure = None
        if self._communicator.local_rank == 0:
            try:
                change(self._array, *operands)
            except Exception as error:
                failure = error
        raise_on_all(self._communicator, f"a variable's {change.__name__}", failure)

    def part_of(self, array: Array) -> Array:
        """The elements that this rank updates, flat."""
        return array.reshape(-1)[self._part]

    def own_part(self) -> Array:
        """This rank's elements; ranks synchronize before they are read."""
        return self.part_of(self._array)

    def zeros(self) -> SharedStorage:
        """In the node's memory too. Raises MemoryError, on every rank, where none is left."""
        zeros = shared_zeros(self._communicator, self.shape, self.dtype)
        if zeros is None:
            raise MemoryError(
                f"no memory that the ranks of a node share is left for {self.dtype} of shape"
                f" {self.shape}: enlarge /dev/shm"
            )
        return zeros


def shared_zeros(
    communicator: Communicator, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> SharedStorage | None:
    """Zeros in the memory of each node; None where a node has none. Collective."""
    array = communicator.empty_shared(shape, dtype)
    if array is None:
        return None
    stored = SharedStorage(communicator, array)
    stored.change(assign, 0)
    return stored


def _check_devices(group: Communicator, compute_devices: Any, parameter_device: Any) -> None:
    """ValueError or BackendUnavailableError for this rank's arguments."""
    given = f"rank {group.rank}: compute_devices={compute_devices!r}"
    names = None if compute_devices is None else parse_devices(compute_devices, given)
    if names is not None and len(names) != group.local_size:
        raise ValueError(
            f"{given}: must have one entry for each of the {group.local_size} ranks of the node"
        )
    if parameter_device is not None and not _CPU.fullmatch(str(parameter_device)):
        raise ValueError(
            f"rank {group.rank}: parameter_device={parameter_device!r}: must name the CPU, as"
            " '/cpu:0' does"
        )
    lacking = nccl_problem() if any(kind == "GPU" for kind, _ in names or ()) else None
    if lacking is not None:
        raise BackendUnavailableError(
            f"CentralStorageStrategy: rank {group.rank} names a GPU in compute_devices; leave them"
            f" out for the CPU. {lacking}"
        )
