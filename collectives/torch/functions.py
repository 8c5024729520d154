"""Collectives that autograd differentiates.

The derivative of each is a collective too: every rank that computes one must compute it. It is made
of the same functions, so that it can be differentiated again.

What a result is differentiated by lies on all ranks, of which some may pass a tensor that requires
no gradient. Each call therefore takes a second tensor, the anchor, which requires one: every rank
takes part in the backward pass, whatever it has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import Function

from collectives.communicator import Communicator
from collectives.reductions.reduction import ReduceOp, as_op
from collectives.torch.untraced import untraced_function
from collectives.world import given

_ANCHOR = torch.empty(0, requires_grad=True)
_LINEAR = (ReduceOp.SUM, ReduceOp.MEAN)


@untraced_function
def all_reduce(tensor: Any, op: ReduceOp | str = "sum", *, comm: Communicator | None = None) -> Any:
    """Reduce the ranks' tensors, of equal shape and dtype, to a new tensor on every rank.

    Like `Communicator.all_reduce`. The gradient of "sum" is the sum of the ranks' gradients, that
    of "mean" their mean. The gradient of "min" and "max" goes to the ranks that hold the result, in
    equal parts. That of "product" gathers all ranks' tensors.

    Args:
        tensor: any shape; a floating or complex dtype is differentiated.
        op: as of `Communicator.all_reduce`.
        comm: the ranks; `collectives.world()` by default.

    Raises:
        MismatchError: the ranks' calls differ; on every rank.
        ValueError: the op is unknown.
        TypeError: the dtype has no such reduction.

    """
    return _AllReduce.apply(tensor, _ANCHOR, as_op(op), given(comm))


@untraced_function
def all_gather(tensor: Any, *, axis: int = 0, comm: Communicator | None = None) -> Any:
    """Concatenate the ranks' tensors along `axis`, in rank order, on every rank.

    Like `Communicator.all_gather`: lengths along the axis may differ by rank, and a 0-d tensor
    counts as one row. The gradient is the sum of all ranks' gradients for the rows of this rank.

    Raises:
        MismatchError: dtypes or the other lengths differ; on every rank.

    """
    return _AllGather.apply(tensor, _ANCHOR, axis, given(comm))


@untraced_function
def reduce_scatter(
    tensor: Any, op: ReduceOp | str = "sum", *, axis: int = 0, comm: Communicator | None = None
) -> Any:
    """Reduce the ranks' tensors; rank r returns block r of `torch.tensor_split` along `axis`.

    Like `Communicator.reduce_scatter`. The gradient of "sum" is every rank's gradient, gathered.
    Ops other than "sum" and "mean" reduce the whole tensor on every rank, as `all_reduce` does.

    Raises:
        MismatchError: the ranks' calls differ; on every rank.

    """
    op, comm = as_op(op), given(comm)
    if op not in _LINEAR:
        return all_reduce(tensor, op, comm=comm).tensor_split(comm.size, axis)[comm.rank]
    return _ReduceScatter.apply(tensor, _ANCHOR, op, axis, comm)


@untraced_function
def all_to_all(tensors: Sequence[Any], *, comm: Communicator | None = None) -> list[Any]:
    """Send tensors[i] to rank i; return the received tensors, entry i from rank i.

    Like `Communicator.all_to_all`: tensors may differ in shape and dtype, which the receivers need
    not know. `all_to_all(tensor.split(lengths))` sends the rows of one tensor. The gradient of what
    was sent is returned by the rank that received it.

    Raises:
        ValueError: `tensors` does not have one entry for each rank.

    """
    return list(_AllToAll.apply(given(comm), _ANCHOR, *tensors))


@untraced_function
def broadcast(tensor: Any, *, root: int = 0, comm: Communicator | None = None) -> Any:
    """A copy of the root's tensor on every rank; no tensor is overwritten.

    The other ranks pass a tensor of equal shape and dtype. The root's gradient is the sum of all
    ranks' gradients, that of the other ranks' tensors is zero.

    Raises:
        MismatchError: shapes, dtypes or roots differ; on every rank.

    """
    return _Broadcast.apply(tensor, _ANCHOR, root, given(comm))


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, anchor: Any, op: ReduceOp, comm: Communicator) -> Any:
        # Tensors that require grad are converted anew by every call.
        result = comm.all_reduce(tensor.detach(), op)
        ctx.op, ctx.comm = op, comm
        if op not in _LINEAR:
            ctx.save_for_backward(tensor, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if ctx.op in _LINEAR:
            return all_reduce(gradient, ctx.op, comm=ctx.comm), None, None, None
        tensor, result = ctx.saved_tensors
        gradient = all_reduce(gradient, comm=ctx.comm)
        return gradient * _slope(tensor, result, ctx.op, ctx.comm), None, None, None


def _slope(tensor: Any, result: Any, op: ReduceOp, comm: Communicator) -> Any:
    """The derivative of each element of the result by this rank's."""
    if op is ReduceOp.PRODUCT:
        # Not the result divided by the tensor, whose elements may be zero.
        rows = all_gather(tensor[None], comm=comm)
        return torch.cat([rows[: comm.rank], rows[comm.rank + 1 :]]).prod(0).conj()
    holds = (tensor == result).to(result.dtype)
    return holds / all_reduce(holds, comm=comm)


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, anchor: Any, axis: int, comm: Communicator) -> Any:
        ctx.shape, ctx.axis, ctx.comm = tensor.shape, axis, comm
        return comm.all_gather(tensor, axis=axis)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        axis, comm = ctx.axis, ctx.comm
        own = ctx.shape[axis] if ctx.shape else 1
        lengths = comm.all_gather(np.array([own])).tolist()
        if len(set(lengths)) == 1:
            rows = reduce_scatter(gradient, axis=axis, comm=comm)
        else:
            received = all_to_all(gradient.split(lengths, axis), comm=comm)
            rows = torch.stack(received).sum(0)
        return rows.reshape(ctx.shape), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Any, anchor: Any, op: ReduceOp, axis: int, comm: Communicator
    ) -> Any:
        ctx.op, ctx.axis, ctx.comm = op, axis, comm
        return comm.reduce_scatter(tensor, op, axis=axis)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gathered = all_gather(gradient, axis=ctx.axis, comm=ctx.comm)
        if ctx.op is ReduceOp.MEAN:
            gathered = gathered / ctx.comm.size
        return gathered, None, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, anchor: Any, *tensors: Any) -> Any:
        ctx.comm = comm
        return tuple(comm.all_to_all(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *all_to_all(gradients, comm=ctx.comm)


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, anchor: Any, root: int, comm: Communicator) -> Any:
        ctx.root, ctx.comm = root, comm
        copy = tensor.clone(memory_format=torch.contiguous_format)
        return comm.broadcast(copy, root=root)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Reduce.apply(gradient, _ANCHOR, ctx.root, ctx.comm), None, None, None


class _Reduce(Function):
    """The sum of the ranks' tensors on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, anchor: Any, root: int, comm: Communicator) -> Any:
        ctx.root, ctx.comm = root, comm
        result = comm.reduce(tensor, root=root)
        return torch.zeros_like(tensor) if result is None else result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return broadcast(gradient, root=ctx.root, comm=ctx.comm), None, None, None
