"""MPI's own collectives through mpi4py, with preallocated buffers of known types.

The buffers' descriptions are made before the measurement, which is mpi4py's fastest form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.cases.base import Call
from bench.peers.base import Peer
from bench.problem import Array, DType
from bench.task import Task

_SHORT_FLOATS = ("float16", "bfloat16")
_OPS = {
    "sum": (MPI.SUM, "iufc"),
    "product": (MPI.PROD, "iufc"),
    "min": (MPI.MIN, "iuf"),
    "max": (MPI.MAX, "iuf"),
}


class MpiPeer(Peer):
    """mpi4py on one communicator."""

    name = "mpi4py"

    def __init__(self, world: MPI.Intracomm) -> None:
        self._world = world

    def dtype_for(self, dtype: DType) -> DType:
        """float32 for 16-bit floats, which have no MPI type, as in a program over MPI."""
        return np.dtype(np.float32) if dtype.name in _SHORT_FLOATS else dtype

    def call(self, collective: str, task: Task, *, nonblocking: bool = False) -> Call | None:
        """MPI's call; of a list there is no nonblocking one."""
        call = super().call(collective, task)
        if not nonblocking or not isinstance(call, partial):
            return None if nonblocking else call
        # Iallreduce and the like take the same arguments.
        start = partial(getattr(self._world, f"I{call.func.__name__.lower()}"), *call.args)
        return lambda: start().Wait()

    def all_reduce(self, task: Task) -> Call | None:
        """With `Allreduce`."""
        op = _op(task)
        if op is None:
            return None
        send = MPI.IN_PLACE if task.in_place else _elements(task.send)
        return partial(self._world.Allreduce, send, _elements(task.out), op)

    def all_reduce_many(self, task: Task) -> Call | None:
        """One `Allreduce` for each tensor, as in a program without fusion."""
        op, all_reduce = _op(task), self._world.Allreduce
        if op is None:
            return None
        tensors, outs = (
            [_elements(tensor) for tensor in np.split(array, task.problem.tensors)]
            for array in (task.send, task.out)
        )
        sends = [MPI.IN_PLACE] * len(outs) if task.in_place else tensors

        def call() -> None:
            for send, out in zip(sends, outs, strict=True):
                all_reduce(send, out, op)

        return call

    def reduce(self, task: Task) -> Call | None:
        """With `Reduce`."""
        op, root = _op(task), task.problem.root
        if op is None:
            return None
        if not task.on_root:
            return partial(self._world.Reduce, _elements(task.send), None, op, root)
        send = MPI.IN_PLACE if task.in_place else _elements(task.send)
        return partial(self._world.Reduce, send, _elements(task.out), op, root)

    def reduce_scatter(self, task: Task) -> Call | None:
        """With `Reduce_scatter`."""
        op, counts = _op(task), [task.problem.block] * task.problem.ranks
        if op is None:
            return None
        send, recv = _elements(task.send), _elements(task.out)
        return partial(self._world.Reduce_scatter, send, recv, counts, op)

    def scan(self, task: Task) -> Call | None:
        """With `Scan`."""
        return self._prefix(task, self._world.Scan, task.out)

    def exscan(self, task: Task) -> Call | None:
        """With `Exscan`, which rank 0 gives a buffer that stays as it is."""
        out = task.out if task.rank or task.in_place else np.empty_like(task.send)
        return self._prefix(task, self._world.Exscan, out)

    def _prefix(self, task: Task, call: Callable[..., None], out: Array) -> Call | None:
        op = _op(task)
        if op is None:
            return None
        return partial(
            call, MPI.IN_PLACE if task.in_place else _elements(task.send), _elements(out), op
        )

    def broadcast(self, task: Task) -> Call:
        """With `Bcast`."""
        return partial(self._world.Bcast, _bytes(task.out), task.problem.root)

    def all_gather(self, task: Task) -> Call:
        """With `Allgather`."""
        return partial(self._world.Allgather, _bytes(task.send), _bytes(task.out))

    def gather(self, task: Task) -> Call:
        """With `Gather`."""
        recv = _bytes(task.out) if task.on_root else None
        return partial(self._world.Gather, _bytes(task.send), recv, task.problem.root)

    def scatter(self, task: Task) -> Call:
        """With `Scatter`."""
        send = _bytes(task.send) if task.on_root else None
        return partial(self._world.Scatter, send, _bytes(task.out), task.problem.root)

    def all_to_all(self, task: Task) -> Call:
        """With `Alltoall`."""
        return partial(self._world.Alltoall, _bytes(task.send), _bytes(task.out))

    def barrier(self, task: Task) -> Call:
        """With `Barrier`."""
        return partial(self._world.Barrier)


def _op(task: Task) -> MPI.Op | None:
    """MPI's op of that name; None if MPI does not have it for the dtype."""
    op, kinds = _OPS.get(task.problem.op, (None, ""))
    return op if task.problem.dtype.kind in kinds else None


def _elements(array: Array) -> list[Any]:
    return [array, array.size, MPI.Datatype.fromcode(array.dtype.char)]


def _bytes(array: Array) -> list[Any]:
    """As bytes, because movements need no type, and MPI lacks some."""
    return [array.view(np.uint8), MPI.BYTE]
