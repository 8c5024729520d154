"""Arrays allocated in buckets, so that they are reduced together without packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays.kinds import to_array
from collectives.calls import Operation
from collectives.calls.many import describe_many
from collectives.communicator import Communicator
from collectives.cuda.runtime import cuda, on_gpu
from collectives.reductions.buckets import Bucket, check_bucket_bytes, check_list, make_buckets
from collectives.reductions.reduction import Array, ReduceOp, as_op, reduction_for


class Fusion:
    """Arrays that are views of a few buckets, and are reduced as those buckets.

    The buckets are registered arrays (`Communicator.empty`), valid while a reference to them or to
    a view of them exists. They are device arrays if `like` holds arrays on a GPU.
    """

    def __init__(
        self,
        comm: Communicator,
        like: Sequence[Any],
        op: ReduceOp | str = "sum",
        bucket_bytes: int | None = None,
    ) -> None:
        """Allocate arrays like the given ones. Collective.

        Args:
            comm: the communicator.
            like: arrays, or pairs (shape, dtype).
            op: the default op of `all_reduce`; its result must have the arrays' dtypes.
            bucket_bytes: the most bytes in a bucket; a larger array has a bucket of its own.

        Raises a MismatchError on every rank if shapes, dtypes, ops or buckets differ by rank,
        ValueError and TypeError as `all_reduce` does.

        """
        like = check_list("like", like)
        self._comm, self._op = comm, as_op(op)
        self._on_gpus, kinds = _on_gpus(like), tuple(map(_kind_of, like))
        self._dtypes = {dtype for _, dtype in kinds}
        self._check(self._op)
        limit = check_bucket_bytes(bucket_bytes)
        signature = describe_many("Fusion", self._op, kinds, limit)
        call_check = Operation(signature, lambda engine: None, self._on_gpus)
        self._buckets: list[Array] = []
        comm._engine.whole(self._make_buckets, call_check, make_buckets(kinds, limit), len(kinds))

    def _check(self, op: ReduceOp) -> None:
        """TypeError where the op's result can't replace the arrays."""
        for dtype in self._dtypes:
            if reduction_for(op, dtype, self._on_gpus).dtype != dtype:
                raise TypeError(f"op={op.value!r} of {dtype}: the result has another dtype")

    def _make_buckets(self, call_check: Operation, buckets: Sequence[Bucket], count: int) -> None:
        comm = self._comm
        comm._run(call_check)
        views: list[Array | None] = [None] * count
        for each in buckets:
            empty = cuda().empty if call_check.on_gpu else comm.empty
            bucket = empty(each.length, each.dtype)
            bucket.view(np.uint8)[...] = 0
            self._buckets.append(bucket)
            for slot in each.slots:
                views[slot.index] = bucket[slot.start : slot.stop].reshape(slot.shape)
        self._views = [view for view in views if view is not None]

    @property
    def views(self) -> list[Array]:
        """The arrays, in the order of `like`, initially zero."""
        return list(self._views)

    def all_reduce(self, op: ReduceOp | str | None = None) -> list[Array]:
        """Reduce all arrays in place, and return them. Collective.

        Like `Communicator.all_reduce` of each array with itself as `out`.
        """
        if op is not None:
            # Of all buckets before the first is reduced.
            self._check(as_op(op))
        return self._comm._engine.whole(self._all_reduce, self._op if op is None else op)

    def _all_reduce(self, op: ReduceOp | str) -> list[Array]:
        for bucket in self._buckets:
            if bucket.size:
                self._comm.all_reduce(bucket, op, out=bucket)
        return self.views


def _on_gpus(like: Sequence[Any]) -> bool:
    """Whether the arrays lie on GPUs; TypeError if only some do."""
    kinds = {on_gpu(each) for each in like if not isinstance(each, tuple)}
    if len(kinds) > 1:
        raise TypeError("like: some of the arrays lie on a GPU, and some on the CPU")
    return True in kinds


def _kind_of(like: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if isinstance(like, tuple):
        shape, dtype = like
        array = np.broadcast_to(np.empty((), dtype), shape)
    else:
        array = to_array(like, "like")
    return array.shape, array.dtype.newbyteorder("=")
