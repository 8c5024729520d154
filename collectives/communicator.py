"""The communicator: collectives on arrays between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.asynchronous.collectives import AsynchronousCollectives
from collectives.asynchronous.point_to_point import PointToPointCalls
from collectives.bound.persistent import PersistentCalls
from collectives.calls import PASS, allocation, objects
from collectives.calls.mailboxes import open_mailbox
from collectives.diagnostics.methods import Diagnostics
from collectives.gpu.reductions import begins_on_gpu
from collectives.group import Group
from collectives.messaging.mailbox import Mailbox
from collectives.reductions.reduction import ReduceOp


class Communicator(Group, AsynchronousCollectives, PersistentCalls, PointToPointCalls, Diagnostics):
    """A group of ranks, and the collective operations between them.

    Every method except `send`, `recv`, `isend`, `irecv`, `explain`, `persistent_all_reduce_many`
    and the properties is collective: all ranks of the group call it, in the same order. Arrays may
    be NumPy arrays, torch tensors, JAX arrays or any object with DLPack, the buffer protocol or
    `__cuda_array_interface__`, on the CPU or an NVIDIA GPU, with any strides. Results are of the
    same kind and own their memory; on a GPU they are ordered after the work on the caller's stream.
    The semantics are those of MPI 4.1, chapter 6, unless stated otherwise.

    Common errors: ValueError and TypeError for arguments that one rank can check by itself, raised
    before any message is sent, such as a torch tensor that requires grad (no call is
    differentiated: use `detach()` or `torch.no_grad()`). A MismatchError on every rank if their
    calls differ. DeadlineExceededError, RankFailedError. RuntimeError after `close`, but for the
    properties.
    """

    def all_reduce(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        what: str | None = None,
    ) -> Any:
        """Reduce the ranks' arrays, of equal shape and dtype, to one result on every rank.

        The results are equal bit for bit, except for the signs and payloads of NaNs if MPI's own
        reduction ("native") runs. `op` is a ReduceOp, which describes each, or its name: "sum",
        "mean", "min", "max", "product", "bitwise_and", "bitwise_or", "bitwise_xor". MEAN of
        integers is float64; a NaN of any rank propagates. `out` receives the result (`array`
        itself: in place), `algorithm` names the algorithm to use, and `what` is a text that must be
        equal on all ranks. Raises ValueError for an unknown op or algorithm, or if `out` has
        another shape or is read-only; TypeError for a dtype without that reduction, or if `out` has
        another dtype.
        """
        if algorithm is None and type(array) is np.ndarray:
            kind = op, array.dtype, array.shape
            try:
                bound = self._bound_calls.get(kind if what is None else (*kind, what))
            except TypeError:  # an unhashable op is invalid, which the general path reports
                bound = None
            if bound is not None and (result := bound(array, out)) is not PASS:
                return result
        return self._calls.all_reduce(array, op, out, algorithm, what)

    def reduce(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        root: int = 0,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Like `all_reduce`, but only the root returns the result; None on other ranks."""
        return self._calls.reduce(array, op, self._root(root), out, algorithm)

    def broadcast(self, array: Any, *, root: int = 0, algorithm: str | None = None) -> Any:
        """Copy the root's array into the other ranks' arrays, of equal shape and dtype; return it.

        Raises ValueError if this rank is not the root and its array is read-only.
        """
        return self._calls.broadcast(array, self._root(root), algorithm)

    def all_gather(
        self, array: Any, *, axis: int = 0, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Concatenate the ranks' arrays along `axis`, in rank order, on every rank.

        Lengths along the axis may differ by rank. The remaining shape and the dtype must not
        (ShapeMismatchError, DtypeMismatchError on every rank). A 0-d array counts as one row. `out`
        receives the result; ValueError on every rank if it has another length.
        """
        return self._calls.all_gather(array, axis, out, algorithm)

    def gather(
        self,
        array: Any,
        *,
        root: int = 0,
        axis: int = 0,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Like `all_gather`, but only the root returns the result; None on other ranks.

        `out` counts on the root alone.
        """
        return self._calls.gather(array, self._root(root), axis, out, algorithm)

    def scatter(
        self,
        array: Any,
        *,
        root: int = 0,
        axis: int = 0,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Cut the root's array along `axis` like `numpy.array_split`; rank r returns block r.

        The other ranks pass None, and the axis as the root does. An error in the root's array is
        raised on every rank. `out` receives the block; a rank whose `out` has another shape or
        dtype raises ValueError or TypeError by itself, after the call: the other ranks have their
        blocks.
        """
        return self._calls.scatter(array, self._root(root), axis, out, algorithm)

    def reduce_scatter(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        axis: int = 0,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce the ranks' arrays; rank r returns block r of `numpy.array_split` along `axis`.

        Shapes, dtypes and errors are those of `all_reduce`; a 0-d array counts as one row. `out`
        has the shape of the block. An axis that the arrays lack is a ValueError.
        """
        return self._calls.reduce_scatter(array, op, axis, out, algorithm)

    def scan(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce the arrays of ranks 0 to r on rank r (MPI 4.1, section 6.11.1).

        Shapes, dtypes, `out` and errors are those of `all_reduce`, without "mean" (ValueError).
        """
        return self._calls.scan(array, op, out, algorithm)

    def exscan(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce the arrays of ranks 0 to r − 1 on rank r (MPI 4.1, section 6.11.2).

        Like `scan`. Rank 0 gets the identity of the op: 0 for "sum", "bitwise_or" and
        "bitwise_xor", 1 for "product", all bits set for "bitwise_and", the largest value or
        infinity for "min", the smallest or minus infinity for "max".
        """
        return self._calls.exscan(array, op, out, algorithm)

    def all_to_all(self, arrays: Any, *, out: Any = None, algorithm: str | None = None) -> Any:
        """Send arrays[i] to rank i; return a list of the received arrays, entry i from rank i.

        They may differ in shape and dtype, which the receivers need not know. One array is cut
        into equal parts along its first axis, and the result, or `out`, has its shape; a rank
        raises a MismatchError if what it received differs from its own parts in shape or dtype, or
        has a dtype that its arrays' library lacks. Raises ValueError for a list of another length
        than the number of ranks, for an array that can't be cut so, and for `out` with a list.
        """
        return self._calls.all_to_all(arrays, out, algorithm)

    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str = "sum",
        *,
        out: Sequence[Any] | None = None,
        bucket_bytes: int | None = None,
        what: str | None = None,
    ) -> list[Any]:
        """`all_reduce` of many arrays, fused by dtype into messages of up to `bucket_bytes` bytes.

        `out` has an array for each input, of its shape and dtype. `bucket_bytes` is by default 25
        MiB, less where all ranks share a node, and equal on all ranks. Equal inputs give equal bits
        in every call. Dtypes are never mixed. `what` should recur. Raises as `all_reduce`, and
        ValueError for another number of outputs, or bucket_bytes below 1.
        """
        if (got := self._many.reduce_known(arrays, op, out, bucket_bytes, what)) is not PASS:
            return got  # type: ignore[no-any-return]  # a typed variable takes time
        self._check_open()
        if begins_on_gpu(arrays):
            return self._many_on_gpus.reduce(arrays, op, out, bucket_bytes, what)
        return self._many.reduce(arrays, op, out, bucket_bytes, what)

    def barrier(self, what: str | None = None) -> None:
        """Return when every rank has called it; a MismatchError if their texts differ."""
        self._calls.barrier(what)

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """A copy of the root's object, pickled, also on the root; for small metadata.

        The error of an object that can't be pickled is raised on every rank.
        """
        return self._calls.broadcast_object(obj, self._root(root))

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Copies of every rank's object in rank order, pickled; for small metadata.

        The error of an object that can't be pickled is raised on every rank.
        """
        copies: list[Any] = self._run(objects.all_gather_object(obj))
        return copies

    def mailbox(self) -> Mailbox:
        """Open a mailbox for unsolicited messages. Collective.

        The mailbox's own methods are not collective: any rank sends to any other at any time, also
        during calls of the communicator. It is closed with the communicator, or by its `close`.
        Raises BackendUnavailableError if the transport has no message channel.
        """
        mailbox: Mailbox = self._run(open_mailbox().then(self._keep))
        return mailbox

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A registered array, uninitialised: collectives on it need no copies. Collective.

        It lies in memory that the node's ranks share, where available, and is valid while a
        reference to it exists. The ranks must request equal shapes and dtypes. Raises ValueError or
        TypeError for a wrong shape or a dtype of objects.
        """
        return self._run(allocation.empty(shape, dtype).then(self._forget))

    def zeros(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """Like `empty`, filled with zeros."""
        return self._run(allocation.zeros(shape, dtype).then(self._forget))

    def empty_shared(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """One array for all ranks of a node, uninitialised. Collective.

        Other ranks see a rank's stores after the next synchronization (`barrier`). The array is
        valid while a reference to it exists on any rank. None, on every rank, if the ranks of some
        node have no shared memory. The ranks must request equal shapes and dtypes. A collective
        must not write, on one rank, what it reads on another: that is, no rank's `out` may be
        memory that another rank gives.
        """
        return self._run(allocation.empty_shared(shape, dtype))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator between the ranks of equal color, ordered by key, then rank.

        Collective; None where color is None. `color` is a non-negative integer, `key` any, both of
        31 bits (as of MPI_Comm_split).
        """
        part: Communicator | None = self._engine.whole(self._split, color, key)
        return part
