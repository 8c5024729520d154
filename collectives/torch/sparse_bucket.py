"""Sparse gradients, of which the ranks gather the rows."""

from __future__ import annotations

from typing import Any

import torch

from collectives.communicator import Communicator
from collectives.torch.buckets import Bucket, Finish, Member, kind_of, refuse_changed


class SparseBucket(Bucket):
    """One parameter with sparse gradients: the rows of all ranks are gathered."""

    calls = 2

    def __init__(self, comm: Communicator, member: Member, what: str) -> None:
        """`what`: as of DenseBucket."""
        self._comm, self.members, self._what = comm, [member], what
        self._kind, self.on_gpu = kind_of(member.parameter), member.parameter.is_cuda

    def start(self, op: str, scale: float | None, *, overlap: bool) -> Finish:
        """Gather the indices and values of all ranks; those of equal indices are added."""
        refuse_changed(self.members, [self._kind])
        parameter = self.members[0].parameter
        with torch.no_grad():
            part = _as_sparse(parameter)
            indices, values = part.indices().t().contiguous(), part.values()
            factor = 1 / self._comm.size if scale is None and op == "mean" else scale
            if factor is not None:
                values = torch.zeros_like(values) if factor == 0 else values * factor
        if overlap:
            handles = [self._comm.all_gather_async(each) for each in (indices, values.contiguous())]
        else:
            # An all_gather has no text.
            self._comm.barrier(self._what)
            gathered = [self._comm.all_gather(each) for each in (indices, values.contiguous())]

        def finish() -> None:
            all_indices, all_values = [each.wait() for each in handles] if overlap else gathered
            total = sparse_tensor(all_indices.t(), all_values, parameter)
            parameter.grad = total.coalesce()

        return finish

    def holds(self, parameter: Any) -> bool:
        """True, as a sparse gradient that is added to may be replaced."""
        return True


def _as_sparse(parameter: Any) -> Any:
    """The gradient, with each index once; without elements if it is missing."""
    gradient = parameter.grad
    if gradient is None:
        shape = (0, *parameter.shape[1:])
        empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        gradient = sparse_tensor(indices, empty, parameter)
    elif not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    return gradient.coalesce()


def sparse_tensor(indices: Any, values: Any, like: Any) -> Any:
    """The rows of sparse tensors of the same shape, which need no further check, as one tensor."""
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)
