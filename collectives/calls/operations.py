"""The collectives of one communicator as operations, which blocking and asynchronous calls run.

Each method has the arguments of the public call of the same name. It checks them and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives.calls import Operation, movements, reductions, scans
from collectives.calls.all_to_all import all_to_all
from collectives.calls.many import Many
from collectives.consistency.signature import check_index
from collectives.execution.engine import Engine
from collectives.reductions.reduction import ReduceOp


class Operations:
    """The operations of one rank."""

    def __init__(self, engine: Engine, many: Many) -> None:
        """`many` keeps the plans of fused lists."""
        self._rank, self._size, self._many = engine.rank, engine.size, many

    def all_reduce(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        what: str | None = None,
    ) -> Operation:
        """The reduction of all ranks' arrays, on every rank."""
        return reductions.all_reduce(array, op, out, algorithm, what)

    def reduce(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        root: int = 0,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Operation:
        """The reduction of all ranks' arrays, on the root."""
        root = self._root(root)
        on_root = self._rank == root
        return reductions.reduce(array, op, root, out, algorithm, on_root=on_root)

    def broadcast(self, array: Any, *, root: int = 0, algorithm: str | None = None) -> Operation:
        """The root's content in every rank's array."""
        root = self._root(root)
        return movements.broadcast(array, root, algorithm, on_root=self._rank == root)

    def all_gather(
        self, array: Any, *, axis: int = 0, out: Any = None, algorithm: str | None = None
    ) -> Operation:
        """All ranks' arrays, joined along the axis, on every rank."""
        return movements.all_gather(array, axis, out, algorithm)

    def gather(
        self, array: Any, *, root: int = 0, axis: int = 0, algorithm: str | None = None
    ) -> Operation:
        """All ranks' arrays, joined along the axis, on the root."""
        return movements.gather(array, self._root(root), axis, algorithm)

    def scatter(
        self, array: Any, *, root: int = 0, axis: int = 0, algorithm: str | None = None
    ) -> Operation:
        """One block of the root's array on every rank."""
        root = self._root(root)
        return movements.scatter(array, root, axis, algorithm, on_root=self._rank == root)

    def reduce_scatter(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        axis: int = 0,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Operation:
        """One block of the reduction of all ranks' arrays on every rank."""
        place = {"rank": self._rank, "size": self._size}
        return reductions.reduce_scatter(array, op, axis, out, algorithm, **place)

    def scan(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Operation:
        """The reduction of the arrays of all ranks up to this one."""
        return scans.scan("scan", array, op, out, algorithm)

    def exscan(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Operation:
        """The reduction of the arrays of all ranks below this one."""
        return scans.scan("exscan", array, op, out, algorithm)

    def all_to_all(
        self, arrays: Any, *, out: Any = None, algorithm: str | None = None
    ) -> Operation:
        """The arrays that each rank sends to this one."""
        return all_to_all(arrays, self._size, algorithm, out)

    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str = "sum",
        *,
        out: Sequence[Any] | None = None,
        bucket_bytes: int | None = None,
        what: str | None = None,
    ) -> Operation:
        """The reductions of many arrays on the CPU."""
        return self._many.operation(arrays, op, out, bucket_bytes, what)[0]

    def barrier(self, what: str | None = None) -> Operation:
        """The synchronization of all ranks."""
        return reductions.barrier(what)

    def _root(self, root: int) -> int:
        return check_index("root", root, self._size)
