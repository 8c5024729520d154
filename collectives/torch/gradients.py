"""Gradients of torch parameters, reduced over the ranks during backward."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch

from collectives.communicator import Communicator
from collectives.compression import CompressedReducer
from collectives.errors import CollectiveError
from collectives.torch.bucket_layout import BUCKET_BYTES, FIRST_BUCKET_BYTES, make_buckets
from collectives.torch.buckets import Accumulated, Bucket, Member, UnusableGradientError
from collectives.torch.closures import fold_number
from collectives.torch.parameters import (
    check_options,
    describe,
    distinct,
    open_reducers,
    refuse_differences,
    refuse_second,
    unfrozen,
    without_gradient,
)
from collectives.torch.reduction_round import GradientError, Reason, Round, at_end, is_nested

__all__ = ["GradientError", "GradientReducer"]

_number_of_backward = torch._C._current_graph_task_id


class GradientReducer:
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

    renewal = "make a new reducer"
    """What a program does where other parameters are to be trained, for messages."""

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
        unused: parameters without a gradient on this rank: "error" raises RuntimeError, on every
            rank; "zeros" counts them as zeros, but leaves None where no rank has a gradient.
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
        self._comm, self._op, self._overlap = comm, op, overlap and compressed is None
        self._weighted, self._unused = weighted, unused
        members = distinct(named_parameters)
        self._names = {id(each.parameter): each.name for each in members}
        self._frozen = [each for each in members if not each.parameter.requires_grad]
        self._trained = [each for each in members if each.parameter.requires_grad]
        self._optional = self._trained if unused == "zeros" else []
        self._reduced = {id(each.parameter) for each in self._trained}
        self._buckets: list[Bucket] = []
        self._hooks: list[Any] = []
        self._round: Round | None = None
        self._accumulated = Accumulated()
        self._synchronizes, self._stepped = True, True
        self._rounds, self._failed, self._weighed = 0, False, 0.0
        self.closed = False
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        if comm.size == 1:
            return
        limits = first_bucket_bytes, bucket_bytes
        given = f"{op=}, {weighted=}, {overlap=}, {wire_dtype=}, {compression=}, {limits=}"
        refuse_second(comm, self._trained)
        refuse_differences(comm, [f"{given}, {sorted(sparse)}", *map(describe, self._trained)])
        positions = [number for number, each in enumerate(self._trained) if each.name in sparse]
        wire = compressed or wire_dtype
        self._buckets = make_buckets(comm, self._trained, positions, wire, limits)
        for number, bucket in enumerate(self._buckets):
            for _, parameter in bucket.members:
                hook = partial(self._arrive, id(parameter), number)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
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

    def wait(self, optimizer: Any = None, *, in_closure: bool = False) -> None:
        """Reduce what no backward has reduced, such as gradients of `no_sync`. To precede a step.

        optimizer: the one that steps. If nothing was reduced since its last step, its gradients,
            zeros if missing, are reduced now with `unused="zeros"`; else that is a GradientError.
            Neither `in_closure`, of which some calls may make no backward.

        Raises GradientError, on every rank, after a backward that an exception interrupted on any.
        """
        if self._comm.size == 1:
            self.weight = None
            return
        try:
            self._finish(optimizer, in_closure)
        finally:
            self._stepped = True
            if optimizer is not None:
                self._steps[optimizer] = self._rounds

    def _finish(self, optimizer: Any, in_closure: bool) -> None:
        if self._round is not None:
            if self._round.backwards:
                raise self._refuse(Reason.INTERRUPTED if self._round.interrupted else Reason.WITHIN)
            # Backwards within a backward that brought no gradient of its own.
            self._end()
        elif self._accumulated.keys or (self._weighted and self.weight == 0):
            self._begin()
            self._end()
        elif optimizer is not None and self._steps.get(optimizer, 0) != self._rounds:
            if self._failed:
                raise GradientError(Reason.FAILED)  # the backward raised it on every rank
        elif optimizer is not None and self._trained and not in_closure:
            self._begin()
            if self._unused == "error":
                raise self._refuse(Reason.NO_BACKWARD)
            self._end()

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

    # Each call comes after a layer's gradients, which have emptied the caches: what it touches
    # counts more than what it computes.
    def _arrive(self, key: int, bucket: int, parameter: Any) -> None:
        """The hook of each parameter: this rank's gradient is complete."""
        current = self._round
        if current is None or not self._synchronizes or current.number != _number_of_backward():
            current = self._enter(key)
            if current is None:
                return
        if key in current.arrived:
            raise self._refuse(self._names[key] + Reason.TWICE)
        if current.again and self._buckets[bucket].holds(parameter):
            raise self._refuse(self._names[key] + Reason.SECOND_SUM)
        current.arrived.add(key)
        self._buckets[bucket].take_large(key, parameter)
        if bucket < current.overlapped:
            self._start(current, bucket)

    def _enter(self, key: int) -> Round | None:
        """The round of the present backward, or None if its gradients are only accumulated."""
        if not self._synchronizes:
            self._accumulated.add(key, self.weight)
            return None
        number = _number_of_backward()
        current = self._round
        if current is not None and number not in current.backwards and current.interrupted:
            # The caller of the interrupted backward has its exception.
            with suppress(GradientError):
                raise self._refuse(Reason.INTERRUPTED)
            current = None
        if current is None:
            current = self._begin()
            current.again = self._op == "sum" and not self._stepped
        if number not in current.backwards:
            current.backwards[number] = at_end(self._end_backward, number)
        current.number = number
        if torch.is_grad_enabled():  # in a hook: whether backward makes a graph
            raise self._refuse(f"{self._names[key]}{Reason.GRAPH}")
        return current

    def _start(self, current: Round, bucket: int) -> None:
        """Start to reduce the complete buckets; one more gradient of `bucket` has arrived."""
        try:
            current.arrive(bucket)
        except UnusableGradientError as error:
            raise self._refuse(str(error)) from None

    def _begin(self) -> Round:
        weight, self.weight = self.weight, None
        self._rounds, self._failed = self._rounds + 1, True  # until its end
        self._round = Round(self._comm, self._buckets, self._op, overlap=self._overlap)
        if self._weighted:
            try:
                self._round.weigh(weight, self._accumulated.weights)
            except BaseException:
                self._reset()
                raise
            self._weighed = weight or 0.0
            if weight == 0:
                self._accumulated.keys.update(self._reduced)
        return self._round

    def _end_backward(self, number: int) -> None:
        """The end of a backward, which may have been made by another backward."""
        if self._round is None:
            return
        self._round.backwards.pop(number, None)
        if self._unused_members() and is_nested():
            return
        self._end()

    def _end(self) -> None:
        assert self._round is not None
        unused = self._unused_members() if self._unused == "error" else []
        if unused:
            raise self._refuse(without_gradient(unused, self.renewal))
        trained = [each for each in self._frozen if each.parameter.requires_grad]
        if trained:
            raise self._refuse(unfrozen(trained) + self.renewal)
        try:
            self._round.complete(self._optional)
        except UnusableGradientError as error:
            raise self._refuse(str(error)) from None
        finally:
            self._reset()
        self._stepped = self._failed = False

    def _unused_members(self) -> list[Member]:
        assert self._round is not None
        if len(self._round.arrived) == len(self._trained):
            return []
        known = self._round.arrived | self._accumulated.keys
        return [each for each in self._trained if id(each.parameter) not in known]

    def _refuse(self, reason: str) -> CollectiveError:
        """End the round on all ranks; the error to raise."""
        assert self._round is not None
        try:
            return self._round.refuse(reason)
        finally:
            self._reset()

    def _reset(self) -> None:
        self._round = None
        self._accumulated.clear()
