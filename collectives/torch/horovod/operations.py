"""Collectives on tensors, by Horovod's names and defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives.lifecycle.futures import Handle
from collectives.reductions.reduction import ReduceOp, as_op
from collectives.torch import functions
from collectives.torch.horovod.compression import Compression, Compressor
from collectives.torch.horovod.joining import Request, request_of, with_joined
from collectives.torch.horovod.state import ranks

Op = ReduceOp | str | None


class Pending:
    """The result of an asynchronous call, for `synchronize` and `poll`."""

    def __init__(self, handle: Handle[Any], finish: Callable[[Any], Any]) -> None:
        self._handle, self._finish = handle, finish
        self._finished: list[Any] = []

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._handle.done()

    def result(self) -> Any:
        """The call's result, or its error."""
        if not self._finished:
            self._finished.append(self._finish(self._handle.wait()))
        return self._finished[0]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """The ranks' tensors reduced, by default averaged, as a new tensor.

    The average of integers is float64, unlike Horovod's. Differentiated if `tensor` requires grad,
    which then must be so on every rank. Raises ValueError for both `average` and `op`.
    """
    op, comm = _op(op, average), ranks()
    sent, kept = compression.compress(_scaled(tensor, prescale_factor))
    if tensor.requires_grad and torch.is_grad_enabled():
        request = Request("allreduce with a gradient")
        reduced = with_joined(comm, request, lambda: functions.all_reduce(sent, op, comm=comm))
    else:
        request = request_of("allreduce", [sent], op)
        reduced = with_joined(comm, request, lambda: comm.all_reduce(sent, op))
    return _scaled(compression.decompress(reduced, kept), postscale_factor)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Like `allreduce`, in place. TypeError for the average of integers."""
    op, comm = _op(op, average), ranks()
    _scale(tensor, prescale_factor)
    request = request_of("allreduce", [tensor], op)
    with_joined(comm, request, lambda: comm.all_reduce(tensor, op, out=tensor))
    return _scale(tensor, postscale_factor)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Start an `allreduce`, which is not differentiated; `synchronize` returns the result.

    It begins with a barrier, for ranks that have joined.
    """
    op = _op(op, average)
    sent = _scaled(tensor.detach(), prescale_factor)
    return _start(sent, op, None, lambda result: _scaled(result, postscale_factor))


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Like `allreduce_async`, in place; `synchronize` returns `tensor`."""
    op = _op(op, average)
    _scale(tensor, prescale_factor)
    return _start(tensor, op, tensor, lambda result: _scale(result, postscale_factor))


def _start(tensor: Any, op: ReduceOp, out: Any, finish: Callable[[Any], Any]) -> Pending:
    comm = ranks()
    request = request_of("allreduce_async", [tensor], op)
    with_joined(comm, request, lambda: comm.barrier(str(request)))
    return Pending(comm.all_reduce_async(tensor, op, out=out), finish)


def synchronize(handle: Pending) -> Any:
    """The result of an asynchronous call, whose error it raises."""
    return handle.result()


def poll(handle: Pending) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.done()


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`allreduce` of many tensors, in few messages. Those that require grad go one by one."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return [allreduce(each, average, None, compression, op, **factors) for each in tensors]
    op, comm = _op(op, average), ranks()
    pairs = [compression.compress(_scaled(each, prescale_factor)) for each in tensors]
    sent = [pair[0] for pair in pairs]
    request = request_of("grouped_allreduce", sent, op)
    reduced = with_joined(comm, request, lambda: comm.all_reduce_many(sent, op))
    return [
        _scaled(compression.decompress(each, kept), postscale_factor)
        for each, (_, kept) in zip(reduced, pairs, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Like `grouped_allreduce`, in place."""
    op, comm = _op(op, average), ranks()
    for each in tensors:
        _scale(each, prescale_factor)
    request = request_of("grouped_allreduce", tensors, op)
    with_joined(comm, request, lambda: comm.all_reduce_many(tensors, op, out=tensors))
    return [_scale(each, postscale_factor) for each in tensors]


def allgather(tensor: Any, name: str | None = None) -> Any:
    """The ranks' tensors, joined along axis 0, in which their lengths may differ."""
    comm = ranks()
    if tensor.requires_grad and torch.is_grad_enabled():
        return _alone("allgather", lambda: functions.all_gather(tensor, comm=comm))
    return _alone("allgather", lambda: comm.all_gather(tensor))


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """A copy of the root's tensor; the other ranks' have equal shape and dtype."""
    comm = ranks()
    if tensor.requires_grad and torch.is_grad_enabled():
        return _alone("broadcast", lambda: functions.broadcast(tensor, root=root_rank, comm=comm))
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return _alone("broadcast", lambda: comm.broadcast(copy, root=root_rank))


def broadcast_(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Copy the root's tensor into the other ranks'; the tensor."""
    comm = ranks()
    return _alone("broadcast", lambda: comm.broadcast(tensor, root=root_rank))


def alltoall(tensor: Any, splits: Any = None, name: str | None = None) -> Any:
    """Send splits[i] rows of the tensor to rank i, and join what the ranks sent.

    Without `splits` every rank gets as many rows. With them, returns the joined rows and how many
    of them each rank sent, an int32 tensor. Raises ValueError if the rows can't be cut so.
    """
    comm, count = ranks(), len(tensor)
    if splits is None:
        if count % comm.size:
            raise ValueError(f"{count} rows: must be a multiple of {comm.size}, or splits be given")
        lengths = [count // comm.size] * comm.size
    else:
        lengths = [int(each) for each in splits]
        if sum(lengths) != count or len(lengths) != comm.size or min(lengths) < 0:
            raise ValueError(
                f"splits={lengths}: must be {comm.size} numbers of rows that add up to {count}"
            )
    parts = tensor.split(lengths)
    if tensor.requires_grad and torch.is_grad_enabled():
        received = _alone("alltoall", lambda: functions.all_to_all(parts, comm=comm))
    else:
        received = _alone("alltoall", lambda: comm.all_to_all(parts))
    joined = torch.cat(received)
    if splits is None:
        return joined
    return joined, torch.tensor([len(each) for each in received], dtype=torch.int32)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduced, by default averaged, tensors; the first ranks get one more.

    Differentiated if `tensor` requires grad, which then must be so on every rank.
    """
    op, comm = _op(op, None), ranks()
    sent, kept = compression.compress(_scaled(tensor, prescale_factor))
    if tensor.requires_grad and torch.is_grad_enabled():
        rows = _alone("reducescatter", lambda: functions.reduce_scatter(sent, op, comm=comm))
    else:
        rows = _alone("reducescatter", lambda: comm.reduce_scatter(sent, op))
    return _scaled(compression.decompress(rows, kept), postscale_factor)


def barrier() -> None:
    """Return when every rank has called it."""
    comm = ranks()
    _alone("barrier", comm.barrier)


def _alone(name: str, call: Callable[[], Any]) -> Any:
    """Make a call in which ranks that have joined can't take part."""
    return with_joined(ranks(), Request(name), call)


def _op(op: Op, average: bool | None) -> ReduceOp:
    """Horovod's older argument, or the newer one."""
    if average is None:
        return ReduceOp.MEAN if op is None else as_op(op)
    if op is not None:
        raise ValueError("average and op were both given: leave out average, the older one")
    return ReduceOp.MEAN if average else ReduceOp.SUM


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * factor


def _scale(tensor: Any, factor: float) -> Any:
    if factor != 1.0:
        with torch.no_grad():
            tensor.mul_(factor)
    return tensor
