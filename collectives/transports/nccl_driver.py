"""The sixteen NCCL functions that are used, so that another binding can replace CuPy's.

Addresses, counts and streams are plain integers, as in NCCL itself. Types and ops are the numbers
of `ncclDataType_t` and `ncclRedOp_t` (docs.nvidia.com/deeplearning/nccl/user-guide).
"""

from __future__ import annotations

from typing import Any, Protocol


class NcclError(RuntimeError):
    """A failed NCCL call; `status` is its `ncclResult_t`."""

    def __init__(self, status: int, text: str) -> None:
        """`text` is NCCL's description."""
        super().__init__(f"NCCL: {text} (status {status})")
        self.status, self.text = status, text

    def __reduce__(self) -> tuple[type[NcclError], tuple[int, str]]:
        return type(self), (self.status, self.text)


class NcclDriver(Protocol):
    """NCCL in one process. Every call raises NcclError if NCCL reports a failure."""

    def problem(self) -> str | None:
        """Why NCCL can't be used, and what to install; None if it can."""

    def version(self) -> int:
        """As of `ncclGetVersion`: 22809 is 2.28.9."""

    def unique_id(self) -> bytes:
        """The identifier that all ranks of a new communicator need."""

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> Any:
        """A communicator on the current GPU. Collective and blocking."""

    def all_reduce(
        self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Reduce `count` elements; in place if source and target are equal."""

    def reduce(
        self,
        comm: Any,
        source: int,
        target: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        stream: int,
    ) -> None:
        """Like `all_reduce`, into the root's target."""

    def broadcast(
        self, comm: Any, source: int, target: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        """Copy the root's source into every target."""

    def all_gather(
        self, comm: Any, source: int, target: int, count: int, dtype: int, stream: int
    ) -> None:
        """`count` elements of every rank; in place if source is the rank's part of target."""

    def reduce_scatter(
        self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """`count` elements for every rank; in place if target is the rank's part of source."""

    def send(self, comm: Any, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send to one rank, which receives."""

    def receive(
        self, comm: Any, target: int, count: int, dtype: int, peer: int, stream: int
    ) -> None:
        """Receive from one rank, which sends."""

    def group_start(self) -> None:
        """Start a group: its calls are launched together by `group_end`."""

    def group_end(self) -> None:
        """Launch the calls of the group."""

    def async_error(self, comm: Any) -> NcclError | None:
        """The error of the calls started so far; None if there is none."""

    def abort(self, comm: Any) -> None:
        """End the communicator and its running work, on this rank alone."""

    def destroy(self, comm: Any) -> None:
        """Destroy the communicator. Collective; no work may run on it."""
