"""Horovod's calls that return a handle. None of them is differentiated.

Each begins with a barrier, for ranks that have joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives.horovod.joining import Request, notice_joined
from collectives.horovod.ops import Op, op_of, text_of
from collectives.horovod.process_sets import ProcessSet, ranks_of, root_of
from collectives.lifecycle.futures import Handle
from collectives.reductions.reduction import ReduceOp
from collectives.torch.horovod.tensors import (
    check_axes,
    in_place,
    joined,
    parts_of,
    request_of,
    scaled,
    store,
    store_all,
)
from collectives.torch.sparse_bucket import sparse_tensor


class Pending:
    """The result of asynchronous calls, for `synchronize` and `poll`."""

    def __init__(
        self, *handles: Handle[Any], finish: Callable[..., Any] = lambda result: result
    ) -> None:
        """`finish` makes the result of those of the handles."""
        self._handles, self._finish = handles, finish
        self._finished: list[Any] = []

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return all(each.done() for each in self._handles)

    def result(self) -> Any:
        """The call's result, or its error."""
        if not self._finished:
            self._finished.append(self._finish(*(each.wait() for each in self._handles)))
        return self._finished[0]

    __call__ = result


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
    what = text_of(name, prescale_factor, postscale_factor)
    notice_joined(comm, request_of("allreduce_async", [sent], op, what))
    handle = comm.all_reduce_async(sent, op)
    return Pending(handle, finish=lambda result: scaled(result, postscale_factor, tensor.dtype))


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
    what = text_of(name, prescale_factor, postscale_factor)
    notice_joined(comm, request_of("allreduce_async", [tensor], op, what))
    sent, out = scaled(tensor, prescale_factor), tensor if in_place([tensor], op) else None
    handle = comm.all_reduce_async(sent, op, out=out)
    return Pending(handle, finish=lambda result: store(result, postscale_factor, tensor))


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
    what = text_of(name, prescale_factor, postscale_factor)
    notice_joined(comm, request_of("grouped_allreduce_async", sent, op, what))
    handle = comm.all_reduce_many_async(sent, op)
    return Pending(
        handle,
        finish=lambda results: [
            scaled(each, postscale_factor, tensor.dtype)
            for each, tensor in zip(results, sent, strict=True)
        ],
    )


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
    given = list(tensors)
    what = text_of(name, prescale_factor, postscale_factor)
    notice_joined(comm, request_of("grouped_allreduce_async", given, op, what))
    sent = [scaled(each, prescale_factor) for each in given]
    out = given if in_place(given, op) else None
    handle = comm.all_reduce_many_async(sent, op, out=out)
    return Pending(handle, finish=lambda results: store_all(results, postscale_factor, given))


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet | None = None
) -> Pending:
    """Start an `allgather`."""
    comm, sent = ranks_of(process_set), tensor.detach()
    notice_joined(comm, Request("allgather_async", what=text_of(name)))
    return Pending(comm.all_gather_async(sent))


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet | None = None
) -> Pending:
    """Start a `grouped_allgather`."""
    comm, sent = ranks_of(process_set), [each.detach() for each in tensors]
    kind = f"grouped_allgather_async of {len(sent)}"
    notice_joined(comm, Request(kind, what=text_of(name)))
    return Pending(*map(comm.all_gather_async, sent), finish=lambda *gathered: list(gathered))


def sparse_allreduce_async(
    tensor: Any, name: str | None, op: Op, process_set: ProcessSet | None = None
) -> Pending:
    """Start the sum or average of sparse tensors of equal shapes.

    `synchronize`, and the handle when it is called, return a sparse tensor. Raises ValueError for
    another op.
    """
    op, comm = op_of(op, None), ranks_of(process_set)
    if op not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise ValueError(f"op={op.value}: must be Average or Sum of sparse tensors")
    part = tensor.detach().coalesce()
    rows = [part.indices().t().contiguous(), part.values().contiguous()]
    kind = f"sparse_allreduce_async: {op.value} of {list(part.shape)}"
    notice_joined(comm, Request(kind, what=text_of(name)))

    def finish(indices: Any, values: Any) -> Any:
        if op is ReduceOp.MEAN:
            values = values / comm.size
        return sparse_tensor(indices.t(), values, part).coalesce()

    return Pending(*map(comm.all_gather_async, rows), finish=finish)


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
    notice_joined(comm, Request("broadcast_async", what=text_of(name)))
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
    notice_joined(comm, Request("alltoall_async", what=text_of(name)))
    handle = comm.all_to_all_async(parts)
    return Pending(handle, finish=lambda received: joined(received, splits))


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: Op = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Start a `reducescatter`."""
    op, comm = op_of(op, None), ranks_of(process_set)
    sent = _to_scatter(tensor, prescale_factor)
    what = text_of(name, prescale_factor, postscale_factor)
    notice_joined(comm, Request("reducescatter_async", what=what))
    handle = comm.reduce_scatter_async(sent, op)
    return Pending(handle, finish=lambda rows: scaled(rows, postscale_factor, sent.dtype))


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Op = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Start a `grouped_reducescatter`."""
    op, comm = op_of(op, None), ranks_of(process_set)
    sent = [_to_scatter(each, prescale_factor) for each in tensors]
    kind = f"grouped_reducescatter_async of {len(sent)}"
    what = text_of(name, prescale_factor, postscale_factor)
    notice_joined(comm, Request(kind, what=what))
    return Pending(
        *(comm.reduce_scatter_async(each, op) for each in sent),
        finish=lambda *results: [
            scaled(rows, postscale_factor, each.dtype)
            for rows, each in zip(results, sent, strict=True)
        ],
    )


def _to_scatter(tensor: Any, factor: float) -> Any:
    check_axes("reducescatter", tensor)
    return scaled(tensor.detach(), factor)
