"""Gradients of torch parameters, reduced over the ranks during backward."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from collectives.communicator import Communicator
from collectives.compression import CompressedReducer
from collectives.torch.backward_hooks import BackwardHooks
from collectives.torch.bucket_layout import BUCKET_BYTES, FIRST_BUCKET_BYTES, make_buckets
from collectives.torch.closures import fold_number
from collectives.torch.parameters import (
    check_options,
    describe,
    distinct,
    open_reducers,
    refuse_differences,
    refuse_second,
)
from collectives.torch.reduction_round import GradientError, Reason, number_of

__all__ = ["GradientError", "GradientReducer"]


class GradientReducer(BackwardHooks):
    """Replaces the gradients of parameters by their mean or sum over the ranks.

    `backward` of a loss does it: when it returns, every `grad` holds the result, which has the same
    bits on every rank. Clipping, gradient scalers and optimizers need no change. The result of
    `torch.autograd.grad` isn't reduced.

    Gradients become views of buckets, arrays in memory that the ranks share, of one dtype each. The
    buckets are reduced in a fixed order, that of reversed parameters, whatever order the gradients
    arrive in, so that the ranks' graphs may differ. `zero_grad(set_to_none=True)` costs a copy of
    each gradient per backward.

    A failure of one rank in `backward` raises an error on every rank, and the next `backward`
    works. A rank whose `backward` was interrupted after its first gradient notifies the others at
    its next `backward` or `wait`. An exception before the first gradient is not noticed: only
    `wait(optimizer)` then notifies the others. In a world of one rank nothing is done.
    """

    weight: float | None = None
    """With `weighted`: how much this rank's gradients count in the next reduction, for example the
    number of samples of its batch. To be set before each backward that reduces; those within
    `no_sync` count as much. A rank with weight 0 may call `wait` instead of backward."""

    def __init__(
        self,
        comm: Communicator,
        named_parameters: Iterable[tuple[str, Any]],
        *,
        op: Literal["mean", "sum"] = "mean",
        weighted: bool = False,
        unused: Literal["error", "zeros"] = "error",
        wire_dtype: Any = None,
        compressed: CompressedReducer | None = None,
        sparse: Collection[str] = (),
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    ) -> None:
        """Allocate the buckets, and install hooks. Collective.

        named_parameters: as of `torch.nn.Module.named_parameters`, frozen ones included.
        op: "mean", or "sum".
        weighted: the mean is that of the ranks' gradients weighted by `weight`.
        unused: parameters without a gradient on this rank: "error" raises GradientError on every
            rank; "zeros" counts them as zeros, and `grad` stays None if no rank has a gradient.
        wire_dtype: a narrower dtype for the messages (torch.float16 or torch.bfloat16), or None.
        sparse: names of parameters whose gradients are sparse. Sparse gradients of other parameters
            become dense.
        overlap: reduce each bucket but the last during backward, on a thread, or all at its end.
        bucket_bytes, first_bucket_bytes: the most that several parameters of a bucket take.
        compressed: reduces dense gradients on the CPU at the end of backward; of `comm`.

        Raises ValueError for these arguments and, on every rank, where the ranks' parameters or
        arguments differ, or another reducer, not closed, has one of the parameters; TypeError for a
        parameter without memory (lazy or on the meta device).
        """
        compression = None if compressed is None else compressed.compression
        check_options(op, unused, weighted, wire_dtype, compression)
        overlap = overlap and compressed is None
        members = distinct(named_parameters)
        super().__init__(comm, members, op, weighted=weighted, unused=unused, overlap=overlap)
        self.closed = False
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        if comm.size == 1:
            return
        limits = first_bucket_bytes, bucket_bytes
        given = (
            f"{op=}, {unused=}, {weighted=}, {overlap=}, {wire_dtype=}, {compression=}, {limits=}"
        )
        refuse_second(comm, self._trained)
        refuse_differences(comm, [f"{given}, {sorted(sparse)}", *map(describe, self._trained)])
        positions = [number for number, each in enumerate(self._trained) if each.name in sparse]
        wire = compressed or wire_dtype
        self._install(make_buckets(comm, self._trained, positions, wire, limits))
        open_reducers.add(self)

    def has_all(self, parameters: Iterable[Any]) -> bool:
        """Whether all the parameters were given, frozen or not."""
        return self._names.keys() >= set(map(id, parameters))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward accumulates gradients, and reduces none.

        The first backward after it reduces the accumulated gradients, or else `wait`.
        """
        usual, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = usual

    def wait(self, optimizer: Any = None) -> None:
        """Reduce what no backward has reduced, such as gradients of `no_sync`.

        optimizer: the optimizer whose `step` this call replaces. If no gradient of it was reduced
            since its last step, they are reduced now, missing ones as zeros, with `unused="zeros"`;
            with "error" that is a GradientError.

        Raises GradientError, on every rank, after a backward that an exception interrupted on any.
        """
        self._wait(optimizer)

    def synchronize(self, optimizer: Any) -> None:
        """Reduce what no backward has reduced, before gradients are clipped or unscaled.

        As `wait(optimizer)`, before a step of the optimizer. On every rank and in every step, where
        a rank may make no backward that reduces: its step alone would come after the others have
        changed what it gets. As `synchronize` of Horovod's optimizers.
        """
        try:
            self._wait(optimizer)
        except GradientError:
            self._refused.add(optimizer)
            raise
        self._synchronized.add(optimizer)

    def before_step(self, optimizer: Any = None, *, in_closure: bool = False) -> None:
        """As `synchronize`, where the program hasn't called it for this step.

        Gradients that are missing `in_closure`, of which some calls may make no backward, are not
        reduced. GradientError, on this rank alone, where it has changed gradients of the optimizer
        that other ranks get only now.
        """
        known = optimizer is not None and optimizer in self._synchronized
        if known:
            self._synchronized.discard(optimizer)
        self._wait(optimizer, may_lack=in_closure or known, late=True)
        if self._early is not None and optimizer is not None:
            self._early.refuse_changes(optimizer)

    def _wait(self, optimizer: Any, *, may_lack: bool = False, late: bool = False) -> None:
        if self._comm.size == 1:
            self.weight = None
            return
        try:
            self._finish(optimizer, may_lack, late)
        finally:
            self._stepped = True
            if optimizer is not None:
                self._steps[optimizer] = self._rounds

    def _finish(self, optimizer: Any, may_lack: bool, late: bool) -> None:
        if self._round is not None:
            if self._round.backwards:
                raise self._refuse(Reason.INTERRUPTED if self._round.interrupted else Reason.WITHIN)
            # Backwards within a backward that brought no gradient of its own.
            self._end()
        elif self._accumulated.keys or (self._weighted and number_of(self.weight) == 0):
            self._begin_outside(late)
            self._end()
        elif late and optimizer is not None and optimizer in self._refused:
            self._refused.discard(optimizer)
            raise GradientError(Reason.FAILED)  # as `synchronize` did, on every rank
        elif optimizer is not None and self._has_gradients_for(optimizer):
            if self._failed:
                raise GradientError(Reason.FAILED)  # the backward raised it on every rank
        elif optimizer is not None and self._trained and not may_lack:
            self._begin_outside(late)
            if self._unused == "error":
                raise self._refuse(Reason.NO_BACKWARD)
            self._end()

    def _begin_outside(self, late: bool) -> None:
        self._begin(late)
        self._outside = True

    def _has_gradients_for(self, optimizer: Any) -> bool:
        """Whether a round since the optimizer's last step has left some, or has failed."""
        if self._steps.get(optimizer, 0) == self._rounds:
            return False
        if self._failed and self._outside:
            return True
        # Those of a round for an earlier step are zeroed since. Weights that are all 0 leave none.
        return self._any_gradient() or (self._weighted and not self._brought)

    def fold_number(self, number: float) -> float:
        """The number's mean or sum over the ranks, weighted as the last gradients. Collective."""
        return fold_number(self._comm, number, self._op, self._weighed if self._weighted else None)

    def reduces(self, parameters: Iterable[Any]) -> bool:
        """Whether the gradient of any of the parameters is reduced."""
        return any(id(each) in self._reduced for each in parameters)

    def close(self) -> None:
        """Remove the hooks, which keep the parameters in memory. Not collective; works twice."""
        self.closed = True
        open_reducers.discard(self)
        while self._hooks:
            self._hooks.pop().remove()
