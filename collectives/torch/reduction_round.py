"""One reduction of all buckets: the same calls in the same order on every rank, even if it fails.

The last bucket is complete when backward ends, so that nothing is left to overlap with: its call
blocks, while those of the others run on a thread. A rank that can't take part makes barriers with
its reason instead of its remaining calls. They match no other rank's call, so every rank gets an
error, and the next round begins in step.
"""

from __future__ import annotations

import math
import reprlib
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from traceback import walk_stack
from typing import Any

import numpy as np
import torch

from collectives.communicator import Communicator
from collectives.consistency.uncaught import raised_on_all
from collectives.errors import CollectiveError, MismatchError, in_step
from collectives.torch.buckets import Bucket, Finish, Member
from collectives.waiting.wait_policy import log

_REFUSED = "no reduction of gradients: "


class Reason:
    """Why gradients are not reduced. Some follow the name of a parameter."""

    INTERRUPTED = "an exception interrupted a backward of this rank"
    WITHIN = "a step within a backward: gradients are reduced when it returns, so step after it"
    FAILED = "no step: the last backward raised the error of its reduction"
    NO_BACKWARD = "no backward has brought gradients on this rank since the optimizer's last step"
    TWICE = (
        " has two gradients in one backward, as of a layer that reentrant checkpoints run twice:"
        " use use_reentrant=False"
    )
    GRAPH = ": backward(create_graph=True) isn't supported: a reduced gradient has no graph"
    SECOND_SUM = (
        ": a second backward without a step would sum the first one's gradients again: use"
        " no_sync() for the first, or zero_grad(set_to_none=True) between them, also if a gradient"
        " scaler skipped the step"
    )


class GradientError(CollectiveError):
    """Gradients couldn't be reduced, for a reason on one rank; raised on every rank."""


def number_of(weight: Any) -> float:
    """A weight as a number, such as of a tensor with one element; NaN where it is none."""
    try:
        return math.nan if isinstance(weight, str | bytes) else float(weight)
    except Exception:  # of any class's own method
        return math.nan


class Round:
    """The calls of one reduction, and the gradients that have arrived for it."""

    def __init__(
        self, comm: Communicator, buckets: Sequence[Bucket], op: str, *, overlap: bool, late: bool
    ) -> None:
        """`late`: this rank makes it when the optimizer steps, not when a backward ends."""
        self._comm, self._buckets, self._op = comm, buckets, op
        self.late, self.some_late = late, False
        self.overlapped = len(buckets) - 1 if overlap else 0
        """How many buckets are reduced during backward."""
        self._finishes: list[Finish] = []
        self._scale: float | None = None
        self._missing = [len(bucket.members) for bucket in buckets]
        for bucket in buckets:
            bucket.begin(buckets)
        self.arrived: set[int] = set()
        """The ids of parameters whose gradients this round reduces."""
        self.again = False
        """Whether gradients that hold a result would be summed again."""
        self.number = -1
        """The number of the backward that brought the last gradient."""
        self.backwards: dict[int, weakref.ref[Any]] = {}
        """By number, the backwards that have brought gradients and have not reached their end.

        Each with its callback, which autograd releases when a backward ends, by an exception too.
        """

    @property
    def interrupted(self) -> bool:
        """Whether an exception has ended a backward that brought gradients."""
        return any(callback() is None for callback in self.backwards.values())

    def weigh(self, weight: Any, earlier: Sequence[Any]) -> float:
        """Sum the ranks' weights; this rank's as a number. Collective, as are all methods below.

        Logs a warning where `earlier` ones, of backwards whose gradients were added to the last
        one's, differ. Raises GradientError, on every rank, for a weight that is no number, negative
        or not finite.
        """
        number = number_of(weight)
        wrong = not 0 <= number < np.inf
        given = [number_of(each) for each in earlier]
        if given and not wrong and not np.allclose(given, number):
            # No error: a program may have dropped those gradients.
            log.warning(
                "weight=%s counts for all gradients that this reduction adds up, also those within"
                " no_sync(), for which weight was %s",
                weight,
                ", ".join(map(str, earlier)),
            )
        total = np.array([0 if wrong else number, self.late], np.float64)
        try:
            if wrong:
                given_weight = weight if math.isfinite(number) else reprlib.repr(weight)
                reason = (
                    f"weight={given_weight}: must be set before each backward that reduces, a"
                    " number ≥ 0"
                )
                self._comm.barrier(_REFUSED + reason)
                raise raised_on_all(GradientError(reason), self._comm.rank)
            self._comm.all_reduce(total, out=total)
        except MismatchError as error:
            raise self._translated(error) from None
        self.some_late = bool(total[1])
        # Without any sample the mean is not defined: zeros.
        self._scale = number / total[0] if total[0] else 0.0
        return number

    def arrive(self, bucket: int) -> None:
        """A gradient of that bucket: start to reduce those that are complete, in their order.

        UnusableGradientError, as of `complete`: the round is to be refused.
        """
        self._missing[bucket] -= 1
        while len(self._finishes) < self.overlapped and not self._missing[len(self._finishes)]:
            self._start_next()

    def complete(self, optional: Sequence[Member]) -> None:
        """Reduce the buckets that are left, whatever has arrived, and wait for all.

        Of the `optional` parameters, those for which no rank has a gradient keep None.
        """
        failed = None
        found = (each.parameter.grad is not None for each in optional)
        present = np.array([self.late, *found], np.uint8)
        try:
            while len(self._finishes) < len(self._buckets):
                self._start_next()
        except MismatchError as error:
            failed = error
        failed = self._finish() or failed
        if failed is not None:
            raise self._translated(failed) from None
        absent = set()
        if optional:
            self._comm.all_reduce(present, "max", out=present)
            self.some_late = self.some_late or bool(present[0])
            for each in compress(optional, present[1:] == 0):
                each.parameter.grad = None
                absent.add(id(each.parameter))
        # All buckets or none: programs skip a step whose gradients aren't finite.
        if any(bucket.leaves_out() for bucket in self._buckets) and self._is_finite():
            for bucket in self._buckets:
                bucket.commit(absent)

    def _is_finite(self) -> bool:
        members = (member for bucket in self._buckets for member in bucket.members)
        found = (each.parameter.grad for each in members)
        values = (each._values() if each.is_sparse else each for each in found if each is not None)
        return all(bool(torch.isfinite(each).all()) for each in values)

    def refuse(self, reason: str) -> CollectiveError:
        """End the round without the remaining calls; the error that every rank raises."""
        failed = self._refuse(reason)
        if failed is not None:
            return self._translated(failed)
        # All ranks had the same reason.
        return raised_on_all(GradientError(reason), self._comm.rank)

    def _start_next(self) -> None:
        number = len(self._finishes)
        overlap = number < self.overlapped
        finish = self._buckets[number].start(self._op, self._scale, overlap=overlap)
        self._finishes.append(finish)

    def _finish(self) -> MismatchError | None:
        """Wait for the calls that were started; the first mismatch."""
        failed = None
        for finish in self._finishes:
            try:
                finish()
            except MismatchError as error:
                failed = failed or error
        return failed

    def _refuse(self, reason: str) -> MismatchError | None:
        text, begun = _REFUSED + reason, len(self._finishes)
        left = self._buckets[begun : self.overlapped]
        later = sum(bucket.calls for bucket in left if not bucket.on_gpu)
        now = sum(bucket.calls for bucket in left if bucket.on_gpu)
        handles = [self._comm.barrier_async(text) for _ in range(later)]
        self._finishes.extend(handle.wait for handle in handles)
        failed = None
        # After those of the other buckets on a GPU, the last one of the round on every rank.
        for _ in range(now + 1):
            try:
                self._comm.barrier(text)
            except MismatchError as error:
                failed = failed or error
        return self._finish() or failed

    def _translated(self, error: MismatchError) -> CollectiveError:
        """An error with the reasons of ranks that refused; other mismatches as they are."""
        reasons = {
            rank: call.partition(_REFUSED)[2].removesuffix(")")
            for rank, call in enumerate(error.calls)
            if _REFUSED in call
        }
        if not reasons:
            return in_step(error)
        text = "\n".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
        return raised_on_all(GradientError(text), self._comm.rank, min(reasons))


def at_end(call: Callable[..., None], *arguments: Any) -> weakref.ref[Any]:
    """Make a call when the present backward ends; a reference that is dead if it never does."""
    # Autograd holds the only reference, until the backward ends.
    callback = partial(call, *arguments)
    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


def is_nested() -> bool:
    """Whether this thread is in a backward that a backward made, such as a reentrant checkpoint."""
    code = torch.autograd.graph._engine_run_backward.__code__
    return sum(frame.f_code is code for frame, _ in walk_stack(sys._getframe())) > 1
