"""The gradients of an optimizer of Horovod's interface, reduced over the ranks during backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from collectives.communicator import Communicator
from collectives.horovod.joining import number_gradients, some_have_joined, with_joined
from collectives.reductions.reduction import as_op
from collectives.torch.closures import LOSS
from collectives.torch.gradients import GradientReducer
from collectives.torch.horovod.tensors import request_of
from collectives.torch.reduction_round import Reason


class JoinedReducer(GradientReducer):
    """A reducer that takes several backwards for one reduction, and zeros of joined ranks."""

    renewal = "make the DistributedOptimizer anew"

    def __init__(self, comm: Communicator, named: Any, passes: int, **options: Any) -> None:
        super().__init__(comm, named, unused="zeros", **options)
        self._optional = []  # zeros also where no rank has a gradient, as in Horovod
        self.passes, self._reductions = passes, 0
        self.compared: Callable[[], str] | None = None
        """What the first reduction compares: `broadcast_optimizer_state` may precede it."""
        self._made: Counter[int] = Counter()
        self._request = number_gradients(comm, self)
        self._overlaps, self._compares_at_end = self._overlap, False

    def _follows_others(self) -> bool:
        """Whether all calls of a reduction are made at the end of backward.

        A rank that has joined makes them at once, where a backward begins reductions of several
        optimizers before it ends one.
        """
        return self._request.optimizer >= 0 and some_have_joined()

    def stepped(self) -> None:
        """Count the reductions until the next step; the ranks compare their numbers."""
        self._reductions = 0

    def all_joined(self) -> None:
        """Begin anew, as on the ranks that have had fewer passes."""
        self.stepped()
        self._made.clear()
        self._accumulated.clear()

    def zeroed(self) -> None:
        """The gradients of the last reduction are gone: a sum can't add them again."""
        self._stepped = True

    def add_zeros(self) -> None:
        """Take part in the reduction that the other ranks make; gradients are lost."""
        self._clear()
        self._accumulated.keys.update(self._reduced)
        self.compared = None  # as on the ranks that reduce
        self._overlap = False
        super()._begin()
        super()._end()
        self._clear()

    def fold_number(self, number: float) -> float:
        """As of any reducer; ranks that have joined add zero."""
        comm, given = self._comm, torch.tensor([number], dtype=torch.float64)
        request = request_of(LOSS, [given], as_op(self._op), LOSS)
        return float(
            with_joined(comm, request, lambda: comm.all_reduce(given, self._op, what=LOSS))
        )

    def _clear(self) -> None:
        for each in self._trained:
            each.parameter.grad = None

    def _arrive(self, key: int, bucket: int, parameter: Any) -> None:
        self._made[key] += 1
        if self._made[key] >= self.passes:
            super()._arrive(key, bucket, parameter)
            return
        if self._op == "sum" and not self._stepped and self._buckets[bucket].holds(parameter):
            raise RuntimeError(self._names[key] + Reason.SECOND_SUM)
        self._accumulated.keys.add(key)

    def _begin(self, late: bool = False) -> Any:
        self._compares_at_end = self._follows_others()
        if not self._compares_at_end:
            self._compare()
        self._overlap = self._overlaps and not self._follows_others()
        return super()._begin(late)

    def _end(self) -> None:
        if self._compares_at_end:
            self._compares_at_end = False
            try:
                self._compare()
            except BaseException:
                self._reset()
                raise
        super()._end()

    def _compare(self) -> None:
        number = self._reductions + 1
        what = f"{self.passes} passes per step, reduction {number} since the last step"
        if self.compared is not None:
            what = f"{what}, {self.compared()}"
        comm, request = self._comm, self._request._replace(what=what)
        with_joined(comm, request, lambda: comm.barrier(str(request)))
        self.compared, self._reductions = None, number

    def _reset(self) -> None:
        super()._reset()
        self._made.clear()
