"""What is needed of NCCL, in fifteen functions, so that another binding can take CuPy's place.

Addresses, counts and streams are plain integers, as in NCCL itself; types and ops are the numbers
of `ncclDataType_t` and `ncclRedOp_t`.
"""

from __future__ import annotations

from typing import Any, Protocol


class NcclError(RuntimeError):
    """A call of NCCL that failed; `status` is its `ncclResult_t`."""

    def __init__(self, status: int, text: str) -> None:
        """`text` is what NCCL says of it."""
        super().__init__(f"NCCL: {text} (status {status})")
        self.status, self.text = status, text

    def __reduce__(self) -> tuple[type[NcclError], tuple[int, str]]:
        return type(self), (self.status, self.text)


class NcclDriver(Protocol):
    """NCCL of one process. Every call raises NcclError where NCCL reports a failure."""

    def problem(self) -> str | None:
        """Why there is no NCCL here, and what to install; None where there is one."""

    def version(self) -> int:
        """As `ncclGetVersion` tells it: 22809 is 2.28.9."""

    def unique_id(self) -> bytes:
        """What all ranks of a new communicator must be given."""

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> Any:
        """A communicator on the current GPU. All ranks call it, and wait for each other."""

    def all_reduce(
        self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """`count` elements; in place where source and target are the same."""

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
        """As `all_reduce`, to the root's target."""

    def broadcast(
        self, comm: Any, source: int, target: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        """The root's source, into every target."""

    def all_gather(
        self, comm: Any, source: int, target: int, count: int, dtype: int, stream: int
    ) -> None:
        """`count` elements of every rank; in place where source is the rank's part of target."""

    def reduce_scatter(
        self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """`count` elements for every rank; in place where target is the rank's part of source."""

    def send(self, comm: Any, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """To one rank, which receives."""

    def receive(
        self, comm: Any, target: int, count: int, dtype: int, peer: int, stream: int
    ) -> None:
        """From one rank, which sends."""

    def group_start(self) -> None:
        """The calls from here on are begun together, by `group_end`."""

    def group_end(self) -> None:
        """Begin the calls of the group."""

    def async_error(self, comm: Any) -> NcclError | None:
        """What went wrong in calls that were begun; None while nothing has."""

    def abort(self, comm: Any) -> None:
        """End the communicator and what runs on it, on this rank alone."""

    def destroy(self, comm: Any) -> None:
        """Give the communicator back. All ranks call it, when nothing runs on it any more."""
