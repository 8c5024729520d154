"""Buckets whose gradients are compressed between nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import finalize

from collectives.arrays.tensors import from_torch
from collectives.communicator import Communicator
from collectives.compression import CompressedReducer, ListName
from collectives.torch.buckets import DenseBucket, Finish, Member


class CompressedBucket(DenseBucket):
    """Parameters of one dtype on the CPU, whose gradients are compressed between nodes."""

    def __init__(
        self,
        comm: Communicator,
        members: Sequence[Member],
        compressed: CompressedReducer,
        what: str,
    ) -> None:
        super().__init__(comm, members, None, what)
        self._compressed = compressed
        self._name = ListName(f"{what}, {members[0].name} to {members[-1].name}")
        finalize(self, compressed.forget, self._name).atexit = False

    def _reduce(self, op: str, overlap: bool) -> Finish:
        """Never on a thread: the reducer makes several calls, of which only the first compares."""
        assert not overlap
        # In the shapes of the parameters, which PowerSGD takes as matrices.
        gradients = [from_torch(place, "gradients") for place in self._places]
        reduced = self._compressed.all_reduce_many(gradients, op, of=self._name, commit=False)
        for gradient, result in zip(gradients, reduced, strict=True):
            gradient[...] = result
        return self._finish

    def leaves_out(self) -> bool:
        """Not if casts compress, or if there is one node."""
        return self._compressed.leaves_out(self._name)

    def commit(self, absent: Collection[int]) -> None:
        """The gradients of absent parameters are not used, so that nothing of them was sent."""
        without = [place for place, each in enumerate(self.members) if id(each[1]) in absent]
        self._compressed.commit(self._name, without)
