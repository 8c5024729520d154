"""CentralStorageStrategy: synchronous training with one copy of every variable on each node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives import BackendUnavailableError, Communicator
from collectives.consistency.uncaught import raised_on_all, raising_on_all
from strategies.base.strategy import Strategy
from strategies.cluster.membership import join_cluster
from strategies.cluster.tf_config import validate_for_collective_training
from strategies.core.device_names import nccl_problem, parse_devices
from strategies.core.indexed_slices import Gradient
from strategies.core.same_error import portable
from strategies.core.storage import Change, Storage, assign

if TYPE_CHECKING:
    from strategies.optimizers import Optimizer
    from strategies.variables.variable import Variable

Array = NDArray[Any]

_CPU = re.compile(r"(.*/)?(device:)?cpu(:\d+)?", re.IGNORECASE)


class CentralStorageStrategy(Strategy):
    """One copy of every variable per node, in memory that the node's ranks share.

    As `tf.distribute.experimental.CentralStorageStrategy`; the ranks are the replicas, and there
    may be several nodes. All ranks read a variable where it lies. In a step, gradients are summed
    over all ranks (fused) and each rank of a node updates a part of the copy, with the optimizer's
    slots, of which a node has one copy as well; the sums being the same bits everywhere, nodes
    need not send each other the new values. Then all ranks meet, so that nobody reads old ones.
    The numbers are MultiWorkerMirroredStrategy's, to the bit. Where ranks of a node have no memory
    in common, on any node, each has a copy of its own.

    The cluster is found as by MultiWorkerMirroredStrategy. `compute_devices` has a name for each
    rank of the node, and `parameter_device` names the CPU, the only device that this version keeps
    variables on: ValueError on every rank otherwise, BackendUnavailableError where a rank names a
    GPU and has none. Making one is collective.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        self.membership = join_cluster(communicator, None, validate_for_collective_training)
        group = self.membership.group
        with raising_on_all(group.rank):
            _check_devices(group, compute_devices, parameter_device)
        super().__init__(
            group,
            cluster_resolver=self.membership.resolver,
            is_chief=self.membership.place.is_chief,
        )

    def store(self, value: NDArray[Any], what: str) -> Storage:
        """In the node's memory. Collective; raises as `mirror`."""
        first = self.mirror(value, what)
        stored = shared_zeros(self.communicator, first.shape, first.dtype)
        if stored is None:
            return super().store(first, what)
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
        problem = None
        if self._communicator.local_rank == 0:
            try:
                change(self._array, *operands)
            except Exception as error:
                problem = portable(error)
        failed = self._communicator.all_gather(np.array([problem is not None]))
        if failed.any():
            raised = self._communicator.broadcast_object(problem, root=int(failed.argmax()))
            raise raised_on_all(raised, self._communicator.rank)

    def part_of(self, array: Array) -> Array:
        """The elements that this rank updates, flat."""
        return array.reshape(-1)[self._part]

    def own_part(self) -> Array:
        """This rank's elements; the ranks must meet before anybody reads them."""
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


def _problem(compute_devices: Any, parameter_device: Any, ranks: int) -> str | None:
    """What is wrong with the devices."""
    try:
        given = ranks if compute_devices is None else len(parse_devices(compute_devices))
    except (TypeError, ValueError) as error:
        return f"compute_devices={compute_devices!r}: {error}"
    if given != ranks:
        return (
            f"compute_devices={compute_devices!r}: must have one entry for each of the {ranks}"
            " ranks of the node"
        )
    if parameter_device is not None and not _CPU.fullmatch(str(parameter_device)):
        return f"parameter_device={parameter_device!r}: must name the CPU, as '/cpu:0' does"
    return None


def _check_devices(communicator: Communicator, compute_devices: Any, parameter_device: Any) -> None:
    """The same ValueError or BackendUnavailableError on every rank. Collective."""
    problem = _problem(compute_devices, parameter_device, communicator.local_size)
    names = [] if problem or compute_devices is None else parse_devices(compute_devices)
    lacking = nccl_problem() if any(kind == "GPU" for kind, _ in names) else None
    reports = communicator.all_gather_object((problem, lacking))
    for rank, (told, _) in enumerate(reports):
        if told is not None:
            raise ValueError(f"rank {rank}: {told}")
    for rank, (_, told) in enumerate(reports):
        if told is not None:
            raise BackendUnavailableError(
                f"CentralStorageStrategy: rank {rank} names a GPU in compute_devices; leave them"
                f" out for the CPU. {told}"
            )
