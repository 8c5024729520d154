"""The parts of local SGD: when the replicas average, and what."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from strategies.optimizers import Optimizer
from strategies.refusals import RefusedTogether
from strategies.variables.storage import Change, LocalStorage

Array = NDArray[Any]

_UNKNOWN, _UNTOUCHED, _TOUCHED = range(3)
_GROWTH = 2


class Rounds:
    """How many steps there are from one averaging to the next: the same number on all ranks."""

    def __init__(self, every: int | None, seconds: float | None) -> None:
        """So many steps, or as many as take about so many seconds: one at first."""
        self._every, self._seconds = every, seconds
        self._taken = 0
        self._length = every or 1
        self._began = time.perf_counter()

    def step(self) -> bool:
        """Count a step; whether the round ends with it."""
        self._taken += 1
        return self._taken >= self._length

    def proposal(self) -> int:
        """The next round's steps as this rank would have them; 0 where it took none yet."""
        if self._seconds is None or not self._taken:
            return self._every or 0
        rate = self._taken / max(time.perf_counter() - self._began, 1e-9)
        # Few steps tell little about the rate: the first ones are slow, or lucky.
        return max(1, int(min(self._seconds * rate, _GROWTH * self._length)))

    def begin(self, proposals: Sequence[int]) -> None:
        """A new round, of the slowest rank's proposal."""
        self._length = min((each for each in proposals if each), default=self._length)
        self._taken = 0
        self._began = time.perf_counter()


class ReplicaStorage(LocalStorage):
    """One replica's own value of a variable, on which all replicas agree after an averaging."""

    def __init__(self, array: Array) -> None:
        super().__init__(array)
        self.touched = False
        self._agreed: Array | None = None

    def begin_step(self, *, keep: bool) -> None:
        """From now on the replicas' values differ; `keep` the one that they agreed on."""
        if keep and not self.touched:
            self._agreed = self._array.copy()
        self.touched = True

    def change(self, change: Change, *operands: Any) -> None:
        """Change the array, and likewise what was agreed on, since all replicas do so."""
        super().change(change, *operands)
        if self._agreed is not None:
            change(self._agreed, *operands)

    def update(self, change: Change, *operands: Any) -> None:
        """Change the array alone."""
        super().change(change, *operands)

    def return_to_agreed(self) -> None:
        """Undo this replica's own steps."""
        if self._agreed is not None:
            self._array[...] = self._agreed

    def settle(self) -> None:
        """The replicas agree again."""
        self.touched, self._agreed = False, None


def _agree_on_step(communicator: Communicator, outer: Optimizer) -> None:
    """A MismatchError on every rank where the outer optimizers would take different steps."""
    with RefusedTogether(communicator, "outer_optimizer"):
        step = f"outer step {outer.iterations + 1} of {outer.settings}"
    communicator.barrier(step)


class Averaging:
    """The values that the replicas average, and how."""

    def __init__(self, communicator: Communicator, outer: Optimizer | None) -> None:
        self._communicator, self._outer = communicator, outer
        self._known: list[weakref.ref[ReplicaStorage]] = []

    def add(self, value: ReplicaStorage) -> None:
        """Average this one as well, as long as every replica has it. All ranks add it."""
        self._known.append(weakref.ref(value))

    def average(self, proposal: int) -> list[int]:
        """Average what any replica's optimizer changed; every rank's proposal. Collective."""
        held = [known() for known in self._known]
        flags = [_UNKNOWN if each is None else _UNTOUCHED + each.touched for each in held]
        told = self._communicator.all_gather(np.array([[proposal, *flags]], np.int64))
        everywhere = told[:, 1:].min(axis=0) > _UNKNOWN
        changed = everywhere & (told[:, 1:].max(axis=0) == _TOUCHED)
        values = [
            each for each, wanted in zip(held, changed, strict=True) if wanted and each is not None
        ]
        if values:
            self._bring_together(values)
        self._known = [known for known, there in zip(self._known, everywhere, strict=True) if there]
        proposals: list[int] = told[:, 0].tolist()
        return proposals

    def _bring_together(self, values: list[ReplicaStorage]) -> None:
        arrays = [value.view() for value in values]
        if self._outer is None:
            self._communicator.all_reduce_many(arrays, "mean", out=arrays)
        else:
            _agree_on_step(self._communicator, self._outer)
            means = self._communicator.all_reduce_many(arrays, "mean")
            for value in values:
                value.return_to_agreed()
            # The outer gradient points from the replicas' mean to where they began.
            gradients = [array - mean for array, mean in zip(arrays, means, strict=True)]
            self._outer.update_stored(gradients, values)
        for value in values:
            value.settle()
