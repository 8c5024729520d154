"""NCCL through `cupy.cuda.nccl`.

Addresses, counts and streams are plain integers, as in NCCL itself. Types and ops are the numbers
of `ncclDataType_t` and `ncclRedOp_t` (docs.nvidia.com/deeplearning/nccl/user-guide).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

_FUNCTIONS = {
    "all_reduce": "allReduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_gather": "allGather",
    "reduce_scatter": "reduceScatter",
    "send": "send",
    "receive": "recv",
}
# Missing from CuPy's table of errors, for which it raises KeyError.
_UNNAMED = {"7": "in progress", "8": "timeout"}


class NcclError(RuntimeError):
    """A failed NCCL call; `status` is its `ncclResult_t`."""

    def __init__(self, status: int, text: str) -> None:
        """`text` is NCCL's description."""
        super().__init__(f"NCCL: {text} (status {status})")
        self.status, self.text = status, text

    def __reduce__(self) -> tuple[type[NcclError], tuple[int, str]]:
        return type(self), (self.status, self.text)


class NcclDriver:
    """NCCL in one process. Every call raises NcclError if NCCL reports a failure.

    No other code calls NCCL, so that tests simulate it and another binding can replace CuPy's.
    """

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # CuPy warns if there is no NCCL; `problem` reports it where it matters.
            warnings.simplefilter("ignore")
            from cupy.cuda import nccl
        self._nccl = nccl

    def problem(self) -> str | None:
        """Why NCCL can't be used, and what to install; None if it can."""
        if self._nccl.available:
            return None
        return (
            "NCCL can't be loaded: `pip install nvidia-nccl-cu12` (for cupy-cuda12x) or"
            " nvidia-nccl-cu13 (for cupy-cuda13x) installs it"
        )

    def version(self) -> int:
        """The loaded library's, as of `ncclGetVersion`: 22809 is 2.28.9."""
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        """The identifier, of 128 bytes, that all ranks of a new communicator need."""
        return bytes(self._call(self._nccl.get_unique_id))

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> Any:
        """A communicator on the current GPU. Collective and blocking.

        Must not run with NCCL_COMM_BLOCKING=0, whose "in progress" CuPy treats as an error.
        """
        return self._call(self._nccl.NcclCommunicator, size, unique_id, rank)

    def enqueue(self, comm: Any, function: str, *arguments: int) -> None:
        """Enqueue the function of that name (a key of `_FUNCTIONS`).

        The arguments are those of NCCL's function, in its order, without the communicator: the
        addresses of source and target, the count, the type, the op, the root or peer, and the
        stream, as far as the function has them. A call is in place as NCCL defines it.
        """
        self._call(getattr(comm, _FUNCTIONS[function]), *arguments)

    def group_start(self) -> None:
        """Start a group: its calls are launched together by `group_end`."""
        self._call(self._nccl.groupStart)

    def group_end(self) -> None:
        """Launch the calls of the group."""
        self._call(self._nccl.groupEnd)

    def async_error(self, comm: Any) -> NcclError | None:
        """The error of the calls started so far; None if there is none."""
        try:
            self._call(comm.check_async_error)
        except NcclError as error:
            return error
        return None

    def abort(self, comm: Any) -> None:
        """End the communicator and its running work, on this rank alone; once is enough."""
        comm.abort()

    def destroy(self, comm: Any) -> None:
        """Destroy the communicator; once is enough. Collective; no work may run on it."""
        comm.destroy()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nccl.NcclError as error:
            raise NcclError(error.status, str(error)) from error
        except KeyError as error:
            status = str(error.args[0])
            raise NcclError(int(status), _UNNAMED.get(status, "unknown error")) from error
