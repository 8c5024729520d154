"""Hooks of parameters by which a backward reduces their gradients, in rounds."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from collectives.communicator import Communicator
from collectives.errors import CollectiveError
from collectives.torch.buckets import Accumulated, Bucket, Member, UnusableGradientError
from collectives.torch.changed_gradients import ReducedGradients
from collectives.torch.parameters import unfrozen, without_gradient
from collectives.torch.reduction_round import GradientError, Reason, Round, at_end, is_nested

_number_of_backward = torch._C._current_graph_task_id


class BackwardHooks:
    """The rounds of one reducer: begun by the first gradient of a backward, ended with it."""

    weight: float | None = None

    renewal = "make a new reducer"
    """What a program does where other parameters are to be trained, for messages."""

    def __init__(
        self,
        comm: Communicator,
        members: Sequence[Member],
        op: str,
        *,
        weighted: bool,
        unused: str,
        overlap: bool,
    ) -> None:
        """Options as of `GradientReducer`. There are no hooks yet."""
        self._comm, self._op, self._overlap = comm, op, overlap
        self._weighted, self._unused = weighted, unused
        self._names = {id(each.parameter): each.name for each in members}
        self._frozen = [each for each in members if not each.parameter.requires_grad]
        self._trained = [each for each in members if each.parameter.requires_grad]
        self._optional = self._trained if unused == "zeros" else []
        self._reduced = {id(each.parameter) for each in self._trained}
        self._buckets: Sequence[Bucket] = []
        self._hooks: list[Any] = []
        self._round: Round | None = None
        self._accumulated = Accumulated()
        self._synchronizes, self._stepped = True, True
        self._rounds, self._failed, self._weighed = 0, False, 0.0
        self._synchronized: weakref.WeakSet[Any] = weakref.WeakSet()
        """The optimizers whose next step finds all gradients reduced."""
        self._outside = False
        """Whether this rank has begun the last round outside of a backward."""
        self._refused: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those whose next step raises the error of their synchronization."""
        self._brought = True
        """Whether the last round has left any gradient."""
        self._early: ReducedGradients | None = None
        """Of the last round, where other ranks have it only in their step."""

    def _install(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        for number, bucket in enumerate(buckets):
            for _, parameter in bucket.members:
                hook = partial(self._arrive, id(parameter), number)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

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
            raise self._refuse(f"{error}{self.renewal}") from None

    def _begin(self, late: bool = False) -> Round:
        weight, self.weight = self.weight, None
        self._rounds, self._failed = self._rounds + 1, True  # until its end
        self._outside = False
        self._synchronized.clear()
        self._refused.clear()
        self._early = None
        self._round = Round(self._comm, self._buckets, self._op, overlap=self._overlap, late=late)
        if self._weighted:
            try:
                self._weighed = self._round.weigh(weight, self._accumulated.weights)
            except BaseException:
                self._reset()
                raise
            if self._weighed == 0:
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
        current = self._round
        try:
            current.complete(self._optional)
        except UnusableGradientError as error:
            raise self._refuse(f"{error}{self.renewal}") from None
        finally:
            self._reset()
        self._stepped = self._failed = False
        self._brought = self._any_gradient()
        if current.some_late and not current.late:
            self._early = ReducedGradients(self._trained)

    def _any_gradient(self) -> bool:
        return any(each.parameter.grad is not None for each in self._trained)

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
