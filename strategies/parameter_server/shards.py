"""A shard on its parameter server, and the changes of its value."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np

from collectives.shm.seqlock import SharedArray
from strategies.core.indexed_slices import IndexedSlices
from strategies.core.values import Array
from strategies.optimizers.update_rules import Slots, UpdateRule
from strategies.variables.scatter import scatter_sub


class Shard:
    """One shard's value, and the optimizers' slots that belong to it."""

    def __init__(self, shared: SharedArray, what: str) -> None:
        """`what` is its name in errors."""
        self._shared, self.what = shared, what
        self.value, self.address = shared.value, shared.address
        self._slots: dict[int, dict[str, Array]] = {}

    def change(self, worker: int, change: bytes, operands: Sequence[Array]) -> None:
        """Change the value by a function, given as a pickle."""
        # A pickle that can't be read is a push that fails, like any other.
        with self._shared.changing(worker):
            pickle.loads(change)(self.value, *operands)

    def update(
        self,
        worker: int,
        optimizer: int,
        pickled: bytes,
        iteration: int,
        gradient: Sequence[Array],
    ) -> None:
        """The optimizer's step of this number, by a rule that is given as a pickle.

        The gradient is one array, or row numbers and the gradients of these rows.
        """
        slots = self._slots.setdefault(optimizer, {})
        with self._shared.changing(worker):
            rule: UpdateRule = pickle.loads(pickled)
            for name in rule.slots:
                if name not in slots:
                    slots[name] = np.zeros_like(self.value)
            if len(gradient) == 1:
                rule.apply(self.value, gradient[0], slots, iteration)
            else:
                self._update_rows(rule, slots, iteration, *gradient)

    def _update_rows(
        self, rule: UpdateRule, slots: Slots, iteration: int, indices: Array, values: Array
    ) -> None:
        """As with a gradient that is zero in all other rows."""
        summed = IndexedSlices(values, indices, self.value.shape).summed()
        step = rule.rows_step(summed.values)
        if step is None:
            rule.apply(self.value, summed.to_dense(), slots, iteration)
        else:
            scatter_sub(self.value, summed.indices, step)

    def slots_of(self, optimizer: int) -> Slots:
        """The optimizer's slots; none before its first update."""
        return self._slots.get(optimizer, {})

    def set_slots(self, worker: int, optimizer: int, slots: Slots, *, keep: bool) -> None:
        """Set slots of an optimizer, but for those that are there if `keep`."""
        own = self._slots.setdefault(optimizer, {})
        with self._shared.changing(worker):
            own.update({**slots, **own} if keep else slots)
