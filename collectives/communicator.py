"""The communicator: collectives on arrays, between the ranks of a group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.calls import (
    PASS,
    allocation,
    movements,
    objects,
    point_to_point,
    reductions,
    tuning,
)
from collectives.calls.all_to_all import all_to_all
from collectives.calls.explain import explain
from collectives.calls.mailboxes import open_mailbox
from collectives.calls.trace import trace
from collectives.consistency.arguments import check_index, check_peer
from collectives.gpu.many import begins_on_gpu
from collectives.group import Group
from collectives.lifecycle.futures import Handle
from collectives.messaging.mailbox import Mailbox
from collectives.reductions.reduction import ReduceOp
from collectives.schedules.spec import spec_of


class Communicator(Group):
    """A group of ranks, and the collective operations between them.

    Every method but `send`, `recv`, `explain` and the properties is collective: all ranks of the
    group call it, in the same order. Arrays may be NumPy arrays, torch tensors, JAX arrays or
    anything else that speaks DLPack, the buffer protocol or `__cuda_array_interface__`, on the CPU
    or NVIDIA GPUs, of any strides; they come back as what they are, on a GPU in the order of the
    caller's stream. Results own their memory. The semantics are those of MPI 4.1, chapter 6,
    unless stated.

    Common errors: ValueError and TypeError for what one rank can see by itself (raised before any
    message is sent), such as a torch tensor that requires grad and whose result would lose it: no
    call is differentiated (`detach()`, `torch.no_grad()`). RuntimeError after `close`.
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
        """Fold the ranks' arrays, of equal shape and dtype, into one, for every rank, bit for bit
        (where MPI's own reduction runs, "native", but for the signs and payloads of NaNs).

        op: a ReduceOp or its name: "sum", "mean", "min", "max", "product". Integer sums wrap; MEAN
        of integers gives float64; NaN on any rank propagates; bool SUM and MAX are or, MIN and
        PRODUCT are and. `out` is where the result goes (`array` itself: in place); `algorithm`
        forces one; `what` is a text that must be equal on all ranks, as in `barrier`. Raises
        ValueError for an unknown op or algorithm or an `out` of another shape or that is read-only,
        TypeError for a dtype that can't be reduced so or an `out` of another dtype.
        """
        if algorithm is None and type(array) is np.ndarray:
            kind = op, array.dtype, array.shape
            try:
                quick = self._quick.get(kind if what is None else (*kind, what))
            except TypeError:  # an op that can't be looked up is none: the general way says so
                quick = None
            if quick is not None:
                result = quick(array, out)
                if result is not PASS:
                    return result
        if algorithm is None:
            result = self._call_cache.all_reduce(array, op, out, what)
            if result is not PASS:
                return result
        return self._run(reductions.all_reduce(array, op, out, algorithm, what))

    def reduce(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        root: int = 0,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """As `all_reduce`, but only the root gets the result; None elsewhere."""
        root = self._root(root)
        on_root = self.rank == root
        return self._run(reductions.reduce(array, op, root, out, algorithm, on_root=on_root))

    def broadcast(self, array: Any, *, root: int = 0, algorithm: str | None = None) -> Any:
        """Write the root's array into the other ranks' arrays, of equal shape and dtype; return it.

        Raises ValueError where this rank's array is read-only and it is not the root.
        """
        root = self._root(root)
        on_root = self.rank == root
        if algorithm is None:
            result = self._call_cache.broadcast(array, root, on_root=on_root)
            if result is not PASS:
                return result
        return self._run(movements.broadcast(array, root, algorithm, on_root=on_root))

    def all_gather(
        self, array: Any, *, axis: int = 0, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Join the ranks' arrays along `axis`, in rank order, on every rank.

        Lengths along the axis may differ by rank; the rest of the shape and the dtype may not
        (ShapeMismatchError, DtypeMismatchError on every rank). A 0-d array counts as one row.
        `out` is where the result goes; ValueError on every rank where it has another length.
        """
        if algorithm is None:
            result = self._call_cache.all_gather(array, axis, out)
            if result is not PASS:
                return result
        return self._run(movements.all_gather(array, axis, out, algorithm))

    def gather(
        self, array: Any, *, root: int = 0, axis: int = 0, algorithm: str | None = None
    ) -> Any:
        """As `all_gather`, but only the root gets the result; None elsewhere."""
        return self._run(movements.gather(array, self._root(root), axis, algorithm))

    def scatter(
        self, array: Any, *, root: int = 0, axis: int = 0, algorithm: str | None = None
    ) -> Any:
        """Cut the root's array along `axis` as `numpy.array_split` does; rank r gets block r.

        The other ranks pass None. What is wrong with the root's array is raised on every rank.
        """
        root = self._root(root)
        on_root = self.rank == root
        return self._run(movements.scatter(array, root, axis, algorithm, on_root=on_root))

    def reduce_scatter(
        self,
        array: Any,
        op: ReduceOp | str = "sum",
        *,
        axis: int = 0,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Fold the ranks' arrays; rank r gets block r of `numpy.array_split` along `axis`."""
        if algorithm is None:
            result = self._call_cache.reduce_scatter(array, op, axis, out)
            if result is not PASS:
                return result
        place = {"rank": self.rank, "size": self.size}
        return self._run(reductions.reduce_scatter(array, op, axis, out, algorithm, **place))

    def all_to_all(self, arrays: Sequence[Any], *, algorithm: str | None = None) -> list[Any]:
        """Send arrays[i] to rank i; return the list of what came, entry i from rank i.

        Blocks may all differ in shape and dtype, and receivers need not know them.
        """
        received: list[Any] = self._run(all_to_all(arrays, self.size, algorithm))
        return received

    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str = "sum",
        *,
        out: Sequence[Any] | None = None,
        bucket_bytes: int | None = None,
    ) -> list[Any]:
        """`all_reduce` of many arrays, fused per dtype into messages of up to `bucket_bytes` bytes.

        The same inputs give the same bits at every call. Dtypes and ops are never mixed.
        """
        reduced = self._many.reduce_known(arrays, op, out, bucket_bytes)
        if reduced is not PASS:
            return reduced  # type: ignore[no-any-return]
        self._check_open()
        if begins_on_gpu(arrays):
            return self._many_on_gpus.reduce(arrays, op, out, bucket_bytes)
        return self._many.reduce(arrays, op, out, bucket_bytes)

    def barrier(self, what: str | None = None) -> None:
        """Return when every rank has called it; a MismatchError where their texts differ."""
        self._run(reductions.barrier(what))

    def send(self, array: Any, peer: int, tag: int = 0) -> None:
        """Send the array's elements to one rank, which receives them with `recv`.

        After DeadlineExceededError the message is still on its way: don't change the array before
        the same `send`, made again, has returned, which sends nothing twice.
        """
        self._check_open()
        point_to_point.send(array, check_peer(peer, self.rank, self.size), tag)(self._engine)

    def recv(self, out: Any, peer: int, tag: int = 0) -> Any:
        """Receive elements from one rank into `out`, and return it.

        Raises ShapeMismatchError where another number of bytes came than `out` holds. After
        DeadlineExceededError the message goes to the next `recv` of the same rank and tag.
        """
        self._check_open()
        return point_to_point.recv(out, check_peer(peer, self.rank, self.size), tag)(self._engine)

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """A copy of the root's object, by pickle; for small metadata. The root gets a copy too."""
        root = self._root(root)
        return self._run(objects.broadcast_object(obj, root, on_root=self.rank == root))

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Copies of every rank's object in rank order, by pickle; for small metadata."""
        gathered: list[Any] = self._run(objects.all_gather_object(obj))
        return gathered

    def all_reduce_async(
        self, array: Any, op: ReduceOp | str = "sum", *, out: Any = None
    ) -> Handle[Any]:
        """Begin an `all_reduce`. Neither `array` nor `out` may be changed until it is done.

        Asynchronous calls run in the order in which they were begun, the same on every rank, on a
        duplicate of the communicator: blocking calls may come in between.
        """
        return self._submit(reductions.all_reduce(array, op, out, None))

    def broadcast_async(self, array: Any, *, root: int = 0) -> Handle[Any]:
        """Begin a `broadcast`."""
        root = self._root(root)
        return self._submit(movements.broadcast(array, root, None, on_root=self.rank == root))

    def all_gather_async(self, array: Any, *, axis: int = 0) -> Handle[Any]:
        """Begin an `all_gather`."""
        return self._submit(movements.all_gather(array, axis, None, None))

    def mailbox(self) -> Mailbox:
        """Open a way for messages that the receiver need not ask for. Collective.

        Its own calls are not: any rank sends to any other at any time, beside the communicator's.
        It ends with this, or by `close`. BackendUnavailableError over a transport without such.
        """
        mailbox: Mailbox = self._run(open_mailbox().then(self._keep))
        return mailbox

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A registered array, uninitialised: collectives on it need no copies. Collective.

        It lies in memory that the node's ranks share, where there is such, and is valid until
        nothing refers to it. Raises a MismatchError where the ranks ask for different ones.
        """
        return self._run(allocation.empty(shape, dtype).then(self._forget))

    def zeros(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """As `empty`, filled with zeros."""
        return self._run(allocation.zeros(shape, dtype).then(self._forget))

    def empty_shared(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """One array for all ranks of a node, uninitialised. Collective.

        What one rank stores the others see once they have met (`barrier`). It is valid until
        nothing refers to it on any rank. None, on every rank, where the ranks of some node have no
        memory in common. Raises a MismatchError where the ranks ask for different ones.
        """
        return self._run(allocation.empty_shared(shape, dtype))

    def explain(self, collective: str, nbytes: int, dtype: Any = "float32") -> str:
        """Which algorithm would run for `nbytes` bytes, what each is expected to take, and by whose
        figures: the built-in ones, those of `tune`, or a file's.
        """
        nbytes = check_index("nbytes", nbytes, 1 << 62)
        return explain(self._engine, spec_of(collective).name, nbytes, np.dtype(dtype))

    def tune(self, *, save: bool = True) -> str:
        """Measure what the paths take here, and choose by that from now on. Collective.

        It takes a second or two, in which the machine should be idle; all ranks end with the same
        figures. `save` keeps them in a file of the user's cache folder (COLLECTIVES_CACHE, or
        mpi-collectives in XDG_CACHE_HOME or ~/.cache), from which communicators on the same host,
        MPI and layout of ranks load them; where it can't be written there is a warning. Returns
        what was measured, for people to read.
        """
        text: str = self._run(tuning.tune(save=save).then(self._forget))
        return text

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last 256 calls of every rank, on one clock, to a file on rank 0. Collective.

        It is JSON for chrome://tracing or ui.perfetto.dev: a process for each rank, a thread each
        for blocking and asynchronous calls. A file that can't be written: OSError on every rank.
        """
        self._run(trace(path, [] if self._progress is None else self._progress.entries()))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator between the ranks of equal color, ordered by key, then rank.

        Collective; None where color is None. `color` is a non-negative integer, `key` any; both
        have 31 bits.
        """
        if color is not None:
            color = check_index("color", color, 1 << 31)
        key = check_index("key", key, 1 << 31, least=-(1 << 31))
        part: Communicator | None = self._engine.whole(self._split, color, key)
        return part

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}>"
