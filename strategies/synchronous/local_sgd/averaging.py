"""The replicas' values, and their averages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator
from strategies.core.same_error import PropagatedErrors
from strategies.core.storage import Change, LocalStorage, assign
from strategies.core.values import Array
from strategies.optimizers import Optimizer

_UNKNOWN, _UNTOUCHED, _TOUCHED = range(3)


class ReplicaStorage(LocalStorage):
    """One replica's own value of a variable, on which all replicas agree after an averaging."""

    is_numbered = False
    """Whether its outer slots are numbered as values were made, not as they were first trained."""

    def __init__(self, array: Array) -> None:
        super().__init__(array)
        self.touched = False
        self._agreed: Array | None = None

    def begin_step(self, *, keep: bool) -> None:
        """From now on the replicas' values differ; `keep`: store the agreed one."""
        if keep and not self.touched:
            self._agreed = self._array.copy()
        self.touched = True

    def change(self, change: Change, *operands: Any) -> None:
        """Change the array, and likewise what was agreed on, since all replicas do so.

        Where they replace it, as by a restored checkpoint, they agree again.
        """
        super().change(change, *operands)
        if change is assign:
            self.settle()
        elif self._agreed is not None:
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


class RankStates(NamedTuple):
    """What the ranks exchange before they average."""

    numbers: list[list[int]]
    """Each rank's numbers."""
    flags: Array
    """The state of each value on each rank: shape (ranks, values), in the order of `held`."""
    held: list[ReplicaStorage | None]
    """This rank's values; None for one that no longer exists."""

    @property
    def touched(self) -> list[bool]:
        """Of each rank, whether its optimizers have changed anything since the last averaging."""
        flags: list[bool] = (self.flags == _TOUCHED).any(axis=1).tolist()
        return flags


class Averaging:
    """The values that the replicas average, and how."""

    def __init__(self, communicator: Communicator, outer: Optimizer | None) -> None:
        self._communicator, self._outer = communicator, outer
        self._known: list[weakref.ref[ReplicaStorage]] = []

    def add(self, value: ReplicaStorage) -> None:
        """Average this one as well, as long as every replica has it. All ranks add it."""
        self._known.append(weakref.ref(value))

    def number(self, values: Iterable[ReplicaStorage]) -> None:
        """Number the outer optimizer's slots of those that have none in this order."""
        for value in values:
            if self._outer is not None:
                self._outer.slots_of(value, ())

    def replace(self, value: ReplicaStorage, new: ReplicaStorage | None) -> None:
        """Drop the value's outer momentum; a new value takes over its number."""
        if self._outer is not None:
            self._outer.replace(value, new)

    def begin_step(self, values: Iterable[ReplicaStorage]) -> None:
        """Before a step that changes these; an outer step needs what was agreed on."""
        for value in values:
            value.begin_step(keep=self._outer is not None)

    def finish_steps(self) -> None:
        """Wait for steps that are computed asynchronously; raises what one of them raises."""
        for known in self._known:
            if (value := known()) is not None and value.touched:
                value.view()

    def exchange(self, *numbers: int) -> RankStates:
        """Gather every rank's numbers, and the state of each of its values. Collective."""
        held = [known() for known in self._known]
        flags = [_UNKNOWN if each is None else _UNTOUCHED + each.touched for each in held]
        row = np.array([[*numbers, *flags]], np.int64)
        table = self._communicator.all_gather(row)
        return RankStates(table[:, : len(numbers)].tolist(), table[:, len(numbers) :], held)

    def average(self, states: RankStates, counted: Sequence[bool]) -> None:
        """Average what any replica's optimizer changed, over the ranks that count. Collective."""
        everywhere = states.flags.min(axis=0) > _UNKNOWN
        changed = everywhere & (states.flags.max(axis=0) == _TOUCHED)
        held = [
            (value, *flags)
            for value, *flags in zip(states.held, everywhere, changed, strict=True)
            if value is not None
        ]
        self.number(value for value, there, _ in held if there and value.is_numbered)
        values = [value for value, _, wanted in held if wanted]
        if values:
            self._average_values(values, counted)
        self._known = [known for known, there in zip(self._known, everywhere, strict=True) if there]

    def _average_values(self, values: list[ReplicaStorage], counted: Sequence[bool]) -> None:
        arrays = [value.view() for value in values]
        if self._outer is not None:
            # A MismatchError on every rank where the outer optimizers would take different steps.
            with PropagatedErrors(self._communicator, "outer_optimizer"):
                step = f"outer step {self._outer.iterations + 1} of {self._outer.settings}"
            self._communicator.barrier(step)
            means = self._means(arrays, counted)
            for value in values:
                value.return_to_agreed()
            # The outer gradient points from the replicas' mean to where they began.
            gradients = [array - mean for array, mean in zip(arrays, means, strict=True)]
            self._outer.update_clipped(self._outer.clipped(gradients), values)
        elif all(counted):
            self._communicator.all_reduce_many(arrays, "mean", out=arrays)
        else:
            for array, mean in zip(arrays, self._means(arrays, counted), strict=True):
                array[...] = mean
        for value in values:
            value.settle()

    def _means(self, arrays: list[Array], counted: Sequence[bool]) -> list[Array]:
        if all(counted):
            return self._communicator.all_reduce_many(arrays, "mean")
        # Divided before, since a sum of 16-bit floats may be too large for them.
        share = 1 / sum(counted) if counted[self._communicator.rank] else None
        shares = [
            np.zeros_like(each) if share is None else np.asarray(each * each.dtype.type(share))
            for each in arrays
        ]
        return self._communicator.all_reduce_many(shares)
