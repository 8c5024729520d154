"""A parameter server's shards, and what is done to them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.core.indexed_slices import IndexedSlices
from strategies.optimizers.update_rules import UpdateRule
from strategies.parameter_server.memory import ServedMemory, ServedShard
from strategies.parameter_server.requests import Place
from strategies.variables.scatter import scatter_sub

Array = NDArray[Any]


@dataclass
class OptimizerState:
    """What one optimizer keeps of one shard."""

    iteration: int = 0
    slots: dict[str, Array] = field(default_factory=dict)


class Shard:
    """One shard's value, and the optimizers' state that belongs to it."""

    def __init__(self, served: ServedShard, what: str) -> None:
        """`what` is its name in messages."""
        self._served, self.what = served, what
        self._states: dict[int, OptimizerState] = {}

    @property
    def value(self) -> Array:
        """The value itself."""
        return self._served.value

    @property
    def place(self) -> Place | None:
        """Where workers of this host find it."""
        return self._served.place

    def change(self, worker: int, change: bytes, operands: Sequence[Array]) -> None:
        """Change the value by a function, given as a pickle."""
        # A pickle that can't be read is a push that fails, like any other.
        with self._served.changing(worker):
            pickle.loads(change)(self.value, *operands)

    def update(
        self, worker: int, optimizer: int, pickled: bytes, gradient: Sequence[Array]
    ) -> None:
        """One step by a rule, given as a pickle.

        The gradient is one array, or row numbers and the gradients of these rows.
        """
        state = self._states.setdefault(optimizer, OptimizerState())
        with self._served.changing(worker):
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
        self,
        rule: UpdateRule,
        slots: Mapping[str, Array],
        iteration: int,
        indices: Array,
        values: Array,
    ) -> None:
        """As with a gradient that is zero in all other rows."""
        summed = IndexedSlices(values, indices, self.value.shape).summed()
        step = rule.rows_step(summed.values)
        if step is None:
            rule.apply(self.value, summed.to_dense(), slots, iteration)
        else:
            scatter_sub(self.value, summed.indices, step)

    def state_of(self, optimizer: int) -> OptimizerState:
        """What the optimizer keeps; nothing before its first update."""
        return self._states.get(optimizer, OptimizerState())

    def set_state(
        self,
        worker: int,
        optimizer: int,
        slots: Mapping[str, Array],
        iteration: int,
        *,
        keep: bool,
    ) -> None:
        """Set slots of an optimizer and its count, but for those that are there if `keep`."""
        state = self._states.setdefault(optimizer, OptimizerState())
        with self._served.changing(worker):
            state.iteration = max(iteration, state.iteration) if keep else iteration
            kept = state.slots if keep else {}
            state.slots.update({**slots, **kept})


class Shards:
    """All shards of one server, by their numbers."""

    def __init__(self, workers: int) -> None:
        self._memory = ServedMemory(workers)
        self._shards: dict[int, Shard] = {}

    def create(self, number: int, what: str, value: Array) -> Place | None:
        """Make one; RuntimeError where it is there."""
        if number in self._shards:
            raise RuntimeError(f"shard {number} exists already: only the chief creates variables")
        self._shards[number] = Shard(self._memory.put(value), what)
        return self._shards[number].place

    def __contains__(self, number: object) -> bool:
        return number in self._shards

    def __getitem__(self, number: int) -> Shard:
        if number not in self._shards:
            known = sorted(self._shards)
            raise RuntimeError(f"there is no shard {number} here, but {known}")
        return self._shards[number]


def shared_out(arrays: Sequence[Array], sparse: Iterable[bool]) -> list[Sequence[Array]]:
    """The arrays of each shard: two where it is sparse, one otherwise."""
    taken, parts = 0, []
    for is_sparse in sparse:
        count = 2 if is_sparse else 1
        parts.append(arrays[taken : taken + count])
        taken += count
    return parts
