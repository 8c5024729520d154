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
    and the properties is collective: all ranks of the group call it, in the same order. Arrays are
    NumPy arrays, torch tensors, JAX arrays, objects with DLPack, the buffer protocol or
    `__cuda_array_interface__`, or numbers and lists of numbers, which become NumPy arrays. They lie
    on the CPU or on the current NVIDIA GPU, with any strides. Results are of the same kind and own
    their memory; on a GPU they are ordered after the work on the caller's stream.
    The semantics are those of MPI 4.1, chapter 6, unless stated otherwise.

    Common errors: ValueError and TypeError for arguments that one rank can check by itself, raised
    before any message is sent, such as a torch tensor that requires grad (no call is
    differentiated: use `detach()` or `torch.no_grad()`). A MismatchError on every rank if their
    calls differ. DeadlineExceededError, RankFailedError. UnusableError, a RuntimeError, after
    `close` or after an exception has broken the communicator; the properties can still be read.
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
        """Reduce the ranks' arrays element by element; every rank returns the result.

        Args:
            array: of equal shape and dtype on all ranks.
            op: a ReduceOp, which describes each, or its name: "sum", "mean", "min", "max",
                "product", "bitwise_and", "bitwise_or", "bitwise_xor". A NaN of any rank propagates.
            out: receives the result, and is returned; `array` itself: in place.
            algorithm: the path or schedule to use, such as "ring" or "native"; None selects one.
            what: a text that the ranks compare with the call.

        Returns an array of the shape and dtype of `array`; MEAN of bool and integers is float64. It
        has the same bits on every rank, except for the signs and payloads of NaNs if MPI's own
        reduction ("native") runs.

        Raises ValueError for an unknown op or algorithm, or if `out` has another shape or is
        read-only; TypeError for a dtype without that reduction, or if `out` has another dtype.

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
        """Overwrite every rank's array with the root's, and return it.

        Shape and dtype are equal on all ranks. The root's array keeps its values, and may be
        read-only. Raises ValueError or TypeError if this rank is not the root and its array can't
        be written.
        """
        return self._calls.broadcast(array, self._root(root), algorithm)

    def all_gather(
        self, array: Any, *, axis: int = 0, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Concatenate the ranks' arrays along `axis`, in rank order; every rank returns the result.

        Lengths along the axis may differ by rank. The remaining shape and the dtype must not
        (ShapeMismatchError, DtypeMismatchError on every rank). A 0-d array counts as one row. `out`
        receives the result: ValueError on every rank if only its length along `axis` is wrong,
        ValueError or TypeError on this rank alone if it can hold no such result.
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
        """Send one array to each rank, and receive one from each.

        Args:
            arrays: a list with an array for each rank, of any shapes and dtypes; or one array whose
                first axis is a multiple of the number of ranks, which is cut into equal parts.
            out: with one array only: receives the result.
            algorithm: as of `all_reduce`.

        Returns the received arrays as a list, entry i from rank i; for one array an array of its
        shape. Raises ValueError for a list of another length than the number of ranks, a first axis
        that doesn't divide, and `out` with a list; a MismatchError on this rank alone if a received
        part has another shape or dtype than its own parts, or a dtype that its arrays' library
        lacks.

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

        `out` is a list with an array for each input, of its shape and dtype. `bucket_bytes` must be
        equal on all ranks; None selects 25 MiB, or less where all ranks share a node. Dtypes are
        never mixed in a message. Equal inputs give equal bits in every call. Use the same `what` in
        every step: prepared calls are cached by it. Raises as `all_reduce`, and ValueError for
        another number of outputs, or bucket_bytes below 1.
        """
        if (got := self._many.reduce_known(arrays, op, out, bucket_bytes, what)) is not PASS:
            return got  # type: ignore[no-any-return]  # a typed variable takes time
        self._check_open()
        if begins_on_gpu(arrays):
            return self._many_on_gpus.reduce(arrays, op, out, bucket_bytes, what)
        return self._many.reduce(arrays, op, out, bucket_bytes, what)

    def barrier(self, what: str | None = None) -> None:
        """Wait until every rank has called it.

        `what` is a text that the ranks compare: a MismatchError on every rank if the texts differ,
        TypeError if it is no text.
        """
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
        """A communicator of the ranks with equal color, ordered by key, then rank. Collective.

        color: an integer from 0 to 2³¹ − 1; None: this rank joins none, and None is returned.
        key: an integer from −2³¹ to 2³¹ − 1. As MPI_Comm_split (MPI 4.1, 7.4.2).

        Raises ValueError or TypeError, on this rank alone, for other values.
        """
        part: Communicator | None = self._engine.whole(self._split, color, key)
        return part
