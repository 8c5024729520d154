"""A shard on its parameter server, and the changes of its value."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from collectives.shm.seqlock import SharedArray
from strategies.core.indexed_slices import IndexedSlices
from strategies.core.values import Array
from strategies.optimizers.update_rules import Slots, UpdateRule
from strategies.variables.scatter import scatter_sub


@dataclass
class ShardState:
    """One optimizer's state of one shard."""

    iteration: int = 0
    slots: dict[str, Array] = field(default_factory=dict)


class Shard:
    """One shard's value, and the optimizers' state that belongs to it."""

    def __init__(self, shared: SharedArray, what: str) -> None:
        """`what` is its name in errors."""
        self._shared, self.what = shared, what
        self.value, self.address = shared.value, shared.address
        self._states: dict[int, ShardState] = {}

    def change(self, worker: int, change: bytes, operands: Sequence[Array]) -> None:
        """Change the value by a function, given as a pickle."""
        # A pickle that can't be read is a push that fails, like any other.
        with self._shared.changing(worker):
            pickle.loads(change)(self.value, *operands)

    def update(
        self, worker: int, optimizer: int, pickled: bytes, gradient: Sequence[Array]
    ) -> None:
        """One step by a rule, given as a pickle.

        The gradient is one array, or row numbers and the gradients of these rows.
        """
        state = self._states.setdefault(optimizer, ShardState())
        with self._shared.changing(worker):
            rule: UpdateRule = pickle.loads(pickled)
            iteration = state.iteration + 1
            for name in rule.slots:
                if name not in state.slots:
                    state.slots[name] = np.zeros_like(self.value)
            if len(gradient) == 1:
                rule.apply(self.value, gradient[0], state.slots, iteration)
            else:
                self._update_rows(rule, state.slots, iteration, *gradient)
            # A step that fails doesn't count.
            state.iteration = iteration

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

    def state_of(self, optimizer: int) -> ShardState:
        """The optimizer's state; empty before its first update."""
        return self._states.get(optimizer, ShardState())

    def set_state(
        self, worker: int, optimizer: int, slots: Slots, iteration: int, *, keep: bool
    ) -> None:
        """Set slots of an optimizer and its count, but for those that are there if `keep`."""
        state = self._states.setdefault(optimizer, ShardState())
        with self._shared.changing(worker):
            state.iteration = max(iteration, state.iteration) if keep else iteration
            kept = state.slots if keep else {}
            state.slots.update({**slots, **kept})
