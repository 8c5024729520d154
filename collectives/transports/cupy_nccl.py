"""NCCL through `cupy.cuda.nccl`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from collectives.transports.nccl_driver import NcclError

# Missing from CuPy's table of errors, for which it raises KeyError.
_UNNAMED = {"7": "in progress", "8": "timeout"}


class CupyNccl:
    """The driver that CuPy includes; `NcclDriver` documents each function."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # CuPy warns if there is no NCCL; `problem` reports it where it matters.
            warnings.simplefilter("ignore")
            from cupy.cuda import nccl
        self._nccl = nccl

    def problem(self) -> str | None:
        """None if libnccl could be loaded."""
        if self._nccl.available:
            return None
        return (
            "NCCL can't be loaded: `pip install nvidia-nccl-cu12` (for cupy-cuda12x) or"
            " nvidia-nccl-cu13 (for cupy-cuda13x) installs it"
        )

    def version(self) -> int:
        """Of the loaded library, not of CuPy's build."""
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        """128 bytes."""
        return bytes(self._call(self._nccl.get_unique_id))

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> Any:
        """Must not run with NCCL_COMM_BLOCKING=0, whose "in progress" CuPy treats as an error."""
        return self._call(self._nccl.NcclCommunicator, size, unique_id, rank)

    def all_reduce(self, comm: Any, *arguments: int) -> None:
        """By ncclAllReduce."""
        self._call(comm.allReduce, *arguments)

    def reduce(self, comm: Any, *arguments: int) -> None:
        """By ncclReduce."""
        self._call(comm.reduce, *arguments)

    def broadcast(self, comm: Any, *arguments: int) -> None:
        """By ncclBroadcast."""
        self._call(comm.broadcast, *arguments)

    def all_gather(self, comm: Any, *arguments: int) -> None:
        """By ncclAllGather."""
        self._call(comm.allGather, *arguments)

    def reduce_scatter(self, comm: Any, *arguments: int) -> None:
        """By ncclReduceScatter."""
        self._call(comm.reduceScatter, *arguments)

    def send(self, comm: Any, *arguments: int) -> None:
        """By ncclSend."""
        self._call(comm.send, *arguments)

    def receive(self, comm: Any, *arguments: int) -> None:
        """By ncclRecv."""
        self._call(comm.recv, *arguments)

    def group_start(self) -> None:
        """By ncclGroupStart."""
        self._call(self._nccl.groupStart)

    def group_end(self) -> None:
        """By ncclGroupEnd."""
        self._call(self._nccl.groupEnd)

    def async_error(self, comm: Any) -> NcclError | None:
        """By ncclCommGetAsyncError."""
        try:
            self._call(comm.check_async_error)
        except NcclError as error:
            return error
        return None

    def abort(self, comm: Any) -> None:
        """By ncclCommAbort. A second call does nothing."""
        comm.abort()

    def destroy(self, comm: Any) -> None:
        """By ncclCommDestroy. A second call does nothing."""
        comm.destroy()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nccl.NcclError as error:
            raise NcclError(error.status, str(error)) from error
        except KeyError as error:
            status = str(error.args[0])
            raise NcclError(int(status), _UNNAMED.get(status, "unknown error")) from error
