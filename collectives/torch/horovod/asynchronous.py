"""Horovod's calls that return a handle. None of them is differentiated.

Each begins with a barrier, for ranks that have joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives.communicator import Communicator
from collectives.lifecycle.futures import Handle
from collectives.torch.horovod.joining import Request, request_of, with_joined
from collectives.torch.horovod.operations import Op, joined, op_of, parts_of, scale, scaled
from collectives.torch.horovod.process_sets import ProcessSet, ranks_of, root_of


class Pending:
    """The result of an asynchronous call, for `synchronize` and `poll`."""

    def __init__(
        self, handle: Handle[Any], finish: Callable[[Any], Any] = lambda result: result
    ) -> None:
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


def synchronize(handle: Pending) -> Any:
    """The result of an asynchronous call, whose error it raises."""
    return handle.result()


def poll(handle: Pending) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.done()


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Pending:
    """Start an `allreduce`; `synchronize` returns the result."""
    op, comm = op_of(op, average), ranks_of(process_set)
    sent = scaled(tensor.detach(), prescale_factor)
    _notice_joined(comm, request_of("allreduce_async", [sent], op))
    handle = comm.all_reduce_async(sent, op)
    return Pending(handle, lambda result: scaled(result, postscale_factor))


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Pending:
    """Like `allreduce_async`, in place; `synchronize` returns `tensor`."""
    op, comm = op_of(op, average), ranks_of(process_set)
    scale(tensor, prescale_factor)
    _notice_joined(comm, request_of("allreduce_async", [tensor], op))
    handle = comm.all_reduce_async(tensor, op, out=tensor)
    return Pending(handle, lambda result: scale(result, postscale_factor))


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Pending:
    """Start a `grouped_allreduce`; `synchronize` returns the list of results."""
    op, comm = op_of(op, average), ranks_of(process_set)
    sent = [scaled(each.detach(), prescale_factor) for each in tensors]
    _notice_joined(comm, request_of("grouped_allreduce_async", sent, op))
    handle = comm.all_reduce_many_async(sent, op)
    return Pending(handle, lambda results: [scaled(each, postscale_factor) for each in results])


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Pending:
    """Like `grouped_allreduce_async`, in place; `synchronize` returns the tensors."""
    op, comm = op_of(op, average), ranks_of(process_set)
    for each in tensors:
        scale(each, prescale_factor)
    _notice_joined(comm, request_of("grouped_allreduce_async", tensors, op))
    handle = comm.all_reduce_many_async(tensors, op, out=tensors)
    return Pending(handle, lambda _: [scale(each, postscale_factor) for each in tensors])


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet | None = None
) -> Pending:
    """Start an `allgather`."""
    comm, sent = ranks_of(process_set), tensor.detach()
    _notice_joined(comm, Request("allgather_async"))
    return Pending(comm.all_gather_async(sent))


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Pending:
    """Start a `broadcast`."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return broadcast_async_(copy, root_rank, name, process_set)


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Pending:
    """Start a `broadcast_`; `synchronize` returns `tensor`."""
    comm, root = ranks_of(process_set), root_of(process_set, root_rank)
    _notice_joined(comm, Request("broadcast_async"))
    return Pending(comm.broadcast_async(tensor, root=root))


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Pending:
    """Start an `alltoall`; `synchronize` returns what that returns."""
    comm = ranks_of(process_set)
    parts = parts_of(tensor.detach(), splits, comm.size)
    _notice_joined(comm, Request("alltoall_async"))
    return Pending(comm.all_to_all_async(parts), lambda received: joined(received, splits))


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Pending:
    """Start a `reducescatter`."""
    op, comm = op_of(op, None), ranks_of(process_set)
    sent = scaled(tensor.detach(), prescale_factor)
    _notice_joined(comm, Request("reducescatter_async"))
    handle = comm.reduce_scatter_async(sent, op)
    return Pending(handle, lambda rows: scaled(rows, postscale_factor))


def _notice_joined(comm: Communicator, request: Request) -> None:
    with_joined(comm, request, lambda: comm.barrier(str(request)))
