"""The peer: NCCL's own calls on the same communicator, without this package."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.cases.base import Call
from bench.task import Task
from collectives import Communicator
from collectives.cuda.interface import Cuda
from collectives.transports.nccl import NcclTransport, reduction_of

NAME = "bare NCCL"
_BYTE = 1


def transport_of(comm: Communicator) -> NcclTransport | None:
    """The NCCL transport of a communicator; None if it uses another path."""
    transport = getattr(comm._devices._path, "_transport", None)
    return transport if isinstance(transport, NcclTransport) else None


class Bare:
    """The calls for a task, on the current stream, or None if NCCL has no such collective.

    CuPy's functions are called without our driver in between, as by a user of CuPy.
    """

    def __init__(self, transport: NcclTransport, cuda: Cuda) -> None:
        """Uses the transport's private handle, because that is what is measured."""
        self._cuda, self._comm, self._float8 = cuda, transport._comm, transport._float8

    def call(self, collective: str, task: Task) -> Call | None:
        """NCCL's call, with all its arguments bound."""
        make: Any = getattr(self, f"_{collective}", None)
        return make(task) if make else None

    def _all_reduce(self, task: Task) -> Call | None:
        return self._reduction("allReduce", task, task.problem.count)

    def _reduce(self, task: Task) -> Call | None:
        return self._reduction("reduce", task, task.problem.count, task.problem.root)

    def _reduce_scatter(self, task: Task) -> Call | None:
        return self._reduction("reduceScatter", task, task.problem.block)

    def _reduction(self, name: str, task: Task, count: int, *root: int) -> Call | None:
        kind = self._kind(task)
        if kind is None:
            return None
        dtype, factor, op = kind
        arguments = *self._places(task), count * factor, dtype, op, *root, self._stream
        return partial(getattr(self._comm, name), *arguments)

    def _broadcast(self, task: Task) -> Call:
        send, _ = self._places(task)
        arguments = task.problem.nbytes, _BYTE, task.problem.root, self._stream
        return partial(self._comm.broadcast, send, send, *arguments)

    def _all_gather(self, task: Task) -> Call:
        send, receive = self._places(task)
        nbytes = task.problem.nbytes // task.problem.ranks
        return partial(self._comm.allGather, send, receive, nbytes, _BYTE, self._stream)

    def _kind(self, task: Task) -> tuple[int, int, int] | None:
        problem = task.problem
        if problem.result_dtype != problem.dtype:
            return None
        return reduction_of(problem.op, problem.dtype, float8=self._float8)

    def _places(self, task: Task) -> tuple[int, int]:
        return self._cuda.address(task.send), self._cuda.address(task.out)

    @property
    def _stream(self) -> int:
        return self._cuda.current_stream().handle
