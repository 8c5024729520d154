"""gloo through torch.distributed, between processes of one host.

torch reduces in place: out of place is a copy and a reduction, as in a torch program.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any

import numpy as np

from bench.cases.base import Call
from bench.peers.base import Peer, PeerUnavailableError
from bench.task import Task

# The dtypes that torch's gloo reduces.
_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8")


class GlooPeer(Peer):
    """torch.distributed's default process group, with the same ranks as the MPI world."""

    name = "gloo"

    def __init__(self, world: Any) -> None:
        # The other ranks would wait for one that raises alone.
        if missing := np.flatnonzero(world.allgather(_missing())).tolist():
            raise PeerUnavailableError(
                f"--peer gloo needs torch, which rank {missing[0]} can't import: `pip install"
                " torch`"
            )
        if _nodes(world) > 1:
            raise PeerUnavailableError("--peer gloo compares the ranks of one host")
        import torch
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._torch, self._dist = torch, dist
        store = world.bcast(_empty_file() if world.rank == 0 else None)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size
        )

    def close(self) -> None:
        """Destroy the group; torch deletes the store with the last rank's group."""
        self._dist.destroy_process_group()

    def call(self, collective: str, task: Task, *, nonblocking: bool = False) -> Call | None:
        """The blocking call, for the dtypes and ops that gloo supports."""
        supported = task.problem.dtype.name in _DTYPES and task.problem.op != "mean"
        return super().call(collective, task, nonblocking=nonblocking) if supported else None

    def all_reduce(self, task: Task) -> Call:
        """With `all_reduce`."""
        out, op = self._tensor(task.out), self._op(task)
        return self._from_copy(task, partial(self._dist.all_reduce, out, op))

    def all_reduce_many(self, task: Task) -> Call:
        """One `all_reduce` for each tensor."""
        tensors = self._tensor(task.out).tensor_split(task.problem.tensors)
        op, all_reduce = self._op(task), self._dist.all_reduce

        def call() -> None:
            for tensor in tensors:
                all_reduce(tensor, op)

        return self._from_copy(task, call)

    def reduce(self, task: Task) -> Call:
        """With `reduce`; gloo writes partial folds into the other ranks' buffers."""
        out = self._tensor(np.empty_like(task.send) if not task.on_root else task.out)
        call = partial(self._dist.reduce, out, task.problem.root, self._op(task))
        if task.in_place and task.on_root:
            return call
        send = self._tensor(task.send)
        return lambda: (out.copy_(send), call())

    def reduce_scatter(self, task: Task) -> Call:
        """With `reduce_scatter`."""
        out, parts = self._tensor(task.out), self._parts(task.send, task)
        return partial(self._dist.reduce_scatter, out, parts, self._op(task))

    def broadcast(self, task: Task) -> Call:
        """With `broadcast`."""
        return partial(self._dist.broadcast, self._tensor(task.out), task.problem.root)

    def all_gather(self, task: Task) -> Call:
        """With `all_gather`."""
        parts, send = self._parts(task.out, task), self._tensor(task.send)
        return partial(self._dist.all_gather, parts, send)

    def gather(self, task: Task) -> Call:
        """With `gather`."""
        parts = self._parts(task.out, task) if task.on_root else None
        return partial(self._dist.gather, self._tensor(task.send), parts, task.problem.root)

    def scatter(self, task: Task) -> Call:
        """With `scatter`."""
        parts = self._parts(task.send, task) if task.on_root else None
        return partial(self._dist.scatter, self._tensor(task.out), parts, task.problem.root)

    def all_to_all(self, task: Task) -> Call:
        """With `all_to_all_single`."""
        out, send = self._tensor(task.out), self._tensor(task.send)
        return partial(self._dist.all_to_all_single, out, send)

    def barrier(self, task: Task) -> Call:
        """With `barrier`."""
        call: Call = self._dist.barrier
        return call

    def _op(self, task: Task) -> Any:
        return getattr(self._dist.ReduceOp, task.problem.op.upper())

    def _tensor(self, array: Any) -> Any:
        if array.dtype.name != "bfloat16":
            return self._torch.from_numpy(array)
        # torch does not support NumPy's bfloat16.
        return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)

    def _parts(self, array: Any, task: Task) -> list[Any]:
        return list(self._tensor(array).tensor_split(task.problem.ranks))

    def _from_copy(self, task: Task, call: Call) -> Call:
        if task.in_place:
            return call
        out, send = self._tensor(task.out), self._tensor(task.send)
        return lambda: (out.copy_(send), call())


def _missing() -> bool:
    try:
        import torch.distributed  # noqa: F401 (tried here)
    except Exception:  # also an OSError of its libraries
        return True
    return False


def _nodes(world: Any) -> int:
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    nodes: int = world.allreduce(int(node.rank == 0))
    node.Free()
    return nodes


def _empty_file() -> str:
    descriptor, path = tempfile.mkstemp(prefix="bench-gloo-")
    os.close(descriptor)
    return path
