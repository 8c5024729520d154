"""Collectives on tensors, by Horovod's names and defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from collectives.communicator import Communicator
from collectives.horovod.joining import Request, notice_joined, with_joined
from collectives.horovod.ops import Op, op_of, text_of
from collectives.horovod.process_sets import ProcessSet, ranks_of, root_of
from collectives.reductions.reduction import ReduceOp
from collectives.torch import functions
from collectives.torch.horovod.compression import Compression, Compressor
from collectives.torch.horovod.tensors import (
    check_axes,
    gradient_times,
    in_place,
    joined,
    parts_of,
    request_of,
    scaled,
    store,
    store_all,
)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Any:
    """The ranks' tensors reduced, by default averaged, as a new tensor of the same dtype.

    Averages of integers, and their products with a factor, are rounded towards zero. Differentiated
    if `tensor` requires grad, which then must be so on every rank. Raises ValueError for both
    `average` and `op`.
    """
    op, comm = op_of(op, average), ranks_of(process_set)
    what = text_of(name, prescale_factor, postscale_factor)
    sent, kept = compression.compress(scaled(tensor, prescale_factor))
    if tensor.requires_grad and torch.is_grad_enabled():
        kind = "allreduce with a gradient"
        reduced = _alone(comm, kind, lambda: functions.all_reduce(sent, op, comm=comm), what)
    else:
        request = request_of("allreduce", [sent], op, what)
        reduced = with_joined(comm, request, lambda: comm.all_reduce(sent, op, what=what))
    return scaled(compression.decompress(reduced, kept), postscale_factor, tensor.dtype)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Any:
    """Like `allreduce`, in place.

    Raises ValueError for a tensor that was computed from others that require grad.
    """
    op, comm = op_of(op, average), ranks_of(process_set)
    what = text_of(name, prescale_factor, postscale_factor)
    request = request_of("allreduce", [tensor], op, what)
    sent, out = scaled(tensor, prescale_factor), tensor if in_place([tensor], op) else None
    reduced = with_joined(comm, request, lambda: comm.all_reduce(sent, op, out=out, what=what))
    return store(reduced, postscale_factor, tensor)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """`allreduce` of many tensors, in few messages. Those that require grad go one by one."""
    tensors = list(tensors)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        given = average, name, compression, op, prescale_factor, postscale_factor, process_set
        kind = f"grouped_allreduce of {len(tensors)}, with a gradient"
        notice_joined(ranks_of(process_set), Request(kind, what=text_of(name)))
        return [allreduce(each, *given) for each in tensors]
    op, comm = op_of(op, average), ranks_of(process_set)
    pairs = [compression.compress(scaled(each, prescale_factor)) for each in tensors]
    sent = [pair[0] for pair in pairs]
    what = text_of(name, prescale_factor, postscale_factor)
    request = request_of("grouped_allreduce", sent, op, what)
    reduced = with_joined(comm, request, lambda: comm.all_reduce_many(sent, op, what=what))
    return [
        scaled(compression.decompress(each, kept), postscale_factor, tensor.dtype)
        for each, (_, kept), tensor in zip(reduced, pairs, tensors, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Like `grouped_allreduce`, in place. ValueError as of `allreduce_`."""
    op, comm = op_of(op, average), ranks_of(process_set)
    given, what = list(tensors), text_of(name, prescale_factor, postscale_factor)
    request = request_of("grouped_allreduce", given, op, what)
    sent = [scaled(each, prescale_factor) for each in given]
    out = given if in_place(given, op) else None
    reduced = with_joined(comm, request, lambda: comm.all_reduce_many(sent, op, out=out, what=what))
    return store_all(reduced, postscale_factor, given)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """The ranks' tensors, joined along axis 0, in which their lengths may differ.

    The gradient is the average of the ranks' gradients of these rows, as Horovod's.
    """
    comm = ranks_of(process_set)
    if tensor.requires_grad and torch.is_grad_enabled():
        sent = gradient_times(tensor, 1 / comm.size)
        call = partial(functions.all_gather, sent, comm=comm)
    else:
        call = partial(comm.all_gather, tensor)
    return _alone(comm, "allgather", call, text_of(name))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """`allgather` of each tensor; the ranks have equally many."""
    request = Request(f"grouped_allgather of {len(tensors)}", what=text_of(name))
    notice_joined(ranks_of(process_set), request)
    return [allgather(each, None, process_set) for each in tensors]


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """A copy of the root's tensor; the other ranks' have equal shape and dtype.

    `root_rank` is its number among all ranks, as in every call with a process set. The root's
    gradient is the average of the ranks' gradients, as Horovod's.
    """
    comm, root = ranks_of(process_set), root_of(process_set, root_rank)
    if tensor.requires_grad and torch.is_grad_enabled():
        sent = gradient_times(tensor, 1 / comm.size)
        call = partial(functions.broadcast, sent, root=root, comm=comm)
    else:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        call = partial(comm.broadcast, copy, root=root)
    return _alone(comm, "broadcast", call, text_of(name))


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Copy the root's tensor into the other ranks'; the tensor."""
    comm, root = ranks_of(process_set), root_of(process_set, root_rank)
    return _alone(comm, "broadcast", partial(comm.broadcast, tensor, root=root), text_of(name))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Send splits[i] rows of the tensor to rank i, and join what the ranks sent.

    Without `splits` every rank gets as many rows. With them, returns the joined rows and how many
    of them each rank sent, an int32 tensor. Raises ValueError if the rows can't be cut so.
    """
    comm = ranks_of(process_set)
    parts = parts_of(tensor, splits, comm.size)
    if tensor.requires_grad and torch.is_grad_enabled():
        call = partial(functions.all_to_all, parts, comm=comm)
    else:
        call = partial(comm.all_to_all, parts)
    return joined(_alone(comm, "alltoall", call, text_of(name)), splits)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduced, by default averaged, tensors; the first ranks get one more.

    Differentiated if `tensor` requires grad, which then must be so on every rank: the gradient is
    the gathered one, times the number of ranks for Sum, as Horovod's. Raises ValueError for a
    tensor without axes.
    """
    op, comm = op_of(op, None), ranks_of(process_set)
    check_axes("reducescatter", tensor)
    sent, kept = compression.compress(scaled(tensor, prescale_factor))
    if tensor.requires_grad and torch.is_grad_enabled():
        if op in (ReduceOp.SUM, ReduceOp.MEAN):
            sent = gradient_times(sent, comm.size)
        call = partial(functions.reduce_scatter, sent, op, comm=comm)
    else:
        call = partial(comm.reduce_scatter, sent, op)
    rows = _alone(comm, "reducescatter", call, text_of(name, prescale_factor, postscale_factor))
    return scaled(compression.decompress(rows, kept), postscale_factor, tensor.dtype)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of each tensor; the ranks have equally many."""
    request = Request(f"grouped_reducescatter of {len(tensors)}", what=text_of(name))
    notice_joined(ranks_of(process_set), request)
    given = None, compression, op, process_set, prescale_factor, postscale_factor
    return [reducescatter(each, *given) for each in tensors]


def barrier(process_set: ProcessSet | None = None) -> None:
    """Return when every rank has called it."""
    comm = ranks_of(process_set)
    _alone(comm, "barrier", comm.barrier)


def _alone(comm: Communicator, name: str, call: Callable[[], Any], what: str | None = None) -> Any:
    """Make a call in which ranks that have joined can't take part; `what` is compared before it."""
    if what is not None:
        notice_joined(comm, Request(name, what=what))
    return with_joined(comm, Request(name), call)
