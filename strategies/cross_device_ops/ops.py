"""The cross-device ops of the package, each an algorithm over `collectives`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from collectives import BackendUnavailableError, Communicator
from collectives import ReduceOp as Reduction
from collectives.calls.reductions import ReduceInput
from collectives.reductions.reduction import reduction_for
from strategies.communication.over_nccl import OverNccl, find_nccl
from strategies.communication.packing import by_bytes, reduce_apart, reduce_packed
from strategies.core.options import CommunicationOptions, ReduceOp
from strategies.core.reports import Report, agree
from strategies.core.values import Array, whole_number
from strategies.core.world import nccl_problem, parse_device
from strategies.cross_device_ops.base import CrossDeviceOps, Pairs


class PackedAllReduce(CrossDeviceOps, ABC):
    """Base of those that reduce flat arrays in place.

    num_packs: into how many packs the arrays of a dtype, joined in reverse order, are cut: equal
    ones, the last with the remainder. With 0 each array goes by itself. Raises ValueError or
    TypeError for anything else. Options give the timeout alone. Arrays on GPUs are not packed: the
    communicator reduces them where they are.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = whole_number("num_packs", num_packs, 0)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> Sequence[Any]:
        """Pack, reduce, unpack. Raises the same MismatchError on every rank where they differ."""
        values = [value for value, _ in value_destination_pairs]
        by_packs = partial(self._reduce_packed, reduce_op)
        return reduce_apart(self.communicator, values, reduce_op.value, by_packs)

    def _reduce_packed(self, reduce_op: ReduceOp, arrays: Sequence[Any]) -> list[Any]:
        """Shapes are compared first: those of packs don't show those of their arrays."""
        inputs = [ReduceInput(array, reduce_op.value) for array in arrays]
        call = f"{self!r}.batch_reduce({reduce_op.value})"
        report = Report(call).of([each.array for each in inputs])
        agree(self.communicator, report, "batch_reduce")
        groups = by_bytes(inputs, 0) if self.num_packs else [[n] for n in range(len(inputs))][::-1]
        reduction = Reduction[reduce_op.name]
        return reduce_packed(
            inputs, groups, lambda pack: self.all_reduce_pack(pack, reduction), self.num_packs or 1
        )

    @abstractmethod
    def all_reduce_pack(self, pack: Array, op: Reduction) -> None:
        """Reduce a contiguous array in place, on every rank: flat, or of one array. Collective."""

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}(num_packs={self.num_packs})"


class RingAllReduce(PackedAllReduce):
    """Round a ring, each rank with its two neighbours (Patarasuk and Yuan 2009)."""

    def all_reduce_pack(self, pack: Array, op: Reduction) -> None:
        """The ring schedule."""
        self.communicator.all_reduce(pack, op, out=pack, algorithm="ring")


class NcclAllReduce(PackedAllReduce):
    """By NCCL's own all-reduce, on GPUs, to which the packs are copied, and from which they return.

    Each rank takes its current GPU, if no two have the same one, else that of its number on its
    node. Raises BackendUnavailableError where this process has no GPU, CuPy or NCCL; where another
    rank lacks them, or two share a GPU, every rank does so at the first reduction. As
    `tf.distribute.NcclAllReduce`.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)
        self._found: WeakKeyDictionary[Communicator, OverNccl] = WeakKeyDictionary()
        problem = nccl_problem()
        if problem is not None:
            raise self._unavailable(problem)

    def _unavailable(self, problem: str) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"NcclAllReduce: {problem}; RingAllReduce and HierarchicalCopyAllReduce need no GPU"
        )

    def all_reduce_pack(self, pack: Array, op: Reduction) -> None:
        """To the GPU, over NCCL, and back."""
        communicator = self.communicator
        nccl = self._found.get(communicator)
        if nccl is None:
            found = find_nccl(communicator)
            if isinstance(found, str):
                raise self._unavailable(found)
            nccl = self._found[communicator] = found
        nccl.all_reduce(communicator, pack, op)


class _Groups(NamedTuple):
    """A rank's group, and that of all groups' leaders, if it is one."""

    own: Communicator
    leaders: Communicator | None


class HierarchicalCopyAllReduce(PackedAllReduce):
    """Each node reduces to its leader, the leaders reduce among themselves and copy to their nodes.

    On a single node, pairs of ranks stand for nodes. As `tf.distribute.HierarchicalCopyAllReduce`,
    which does so between halves of a machine's GPUs.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)
        self._groups: WeakKeyDictionary[Communicator, _Groups] = WeakKeyDictionary()

    def all_reduce_pack(self, pack: Array, op: Reduction) -> None:
        """To the leader, between the leaders, and back."""
        communicator = self.communicator
        own, leaders = self._groups_of(communicator)
        own.reduce(pack, "sum", out=None if leaders is None else pack)
        if leaders is not None:
            leaders.all_reduce(pack, "sum", out=pack)
        own.broadcast(pack)
        reduction_for(op, pack.dtype).finish(pack, communicator.size)

    def _groups_of(self, communicator: Communicator) -> _Groups:
        """The rank's groups, with the communicator's deadline. Collective the first time."""
        groups = self._groups.get(communicator)
        if groups is None:
            alone = communicator.nodes == 1
            own = communicator.split(communicator.rank // 2 if alone else communicator.node)
            assert own is not None
            groups = _Groups(own, communicator.split(0 if own.rank == 0 else None))
            self._groups[communicator] = groups
        for each in groups:
            if each is not None:
                each.deadline = communicator.deadline
        return groups


class ReductionToOneDevice(PackedAllReduce):
    """Reduced on one rank, which then sends the result to all.

    reduce_to_device: a rank, or a device's name, such as "CPU:1", whose number is the rank; rank 0
    without. accumulation_fn: `fn([array of rank 0, array of rank 1, …]) → array` of their shape,
    for each array by itself, on that rank alone, instead of the sum; it gets float64 for a mean of
    integers, and means are divided by the number of replicas afterwards. Raises ValueError for
    another device or a rank that there is not, and, on every rank, where accumulation_fn fails.
    As `tf.distribute.ReductionToOneDevice`.
    """

    def __init__(
        self,
        reduce_to_device: str | int | None = None,
        accumulation_fn: Callable[[list[Array]], Any] | None = None,
    ) -> None:
        super().__init__(num_packs=1 if accumulation_fn is None else 0)
        device = reduce_to_device or 0
        self.root = device if isinstance(device, int) else parse_device(device)[1]
        self.accumulation_fn = accumulation_fn

    def all_reduce_pack(self, pack: Array, op: Reduction) -> None:
        """To the root, and from it."""
        communicator = self.communicator
        if not 0 <= self.root < communicator.size:
            raise ValueError(f"{self!r}: there are {communicator.size} ranks")
        if self.accumulation_fn is None:
            out = pack if communicator.rank == self.root else None
            communicator.reduce(pack, "sum", root=self.root, out=out)
        else:
            self._accumulate(pack, self.accumulation_fn)
        communicator.broadcast(pack, root=self.root)
        reduction_for(op, pack.dtype).finish(pack, communicator.size)

    def _accumulate(self, pack: Array, accumulate: Callable[[list[Array]], Any]) -> None:
        """Write the accumulated array to the root's pack; an error is raised on every rank."""
        gathered = self.communicator.gather(pack[np.newaxis], root=self.root)
        problem = None
        if gathered is not None:
            try:
                result = np.asarray(accumulate(list(gathered)))
                if result.shape != pack.shape:
                    raise ValueError(f"it made shape {result.shape} of arrays of {pack.shape}")
                pack[...] = result
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        problem = self.communicator.broadcast_object(problem, root=self.root)
        if problem is not None:
            raise ValueError(f"accumulation_fn failed on rank {self.root}: {problem}")

    def __repr__(self) -> str:
        fn = self.accumulation_fn
        # The same text on every rank: no addresses.
        by = "" if fn is None else f", {getattr(fn, '__name__', type(fn).__name__)}"
        return f"{type(self).__qualname__}({self.root}{by})"
