"""An optimizer's state in a checkpoint, with slots named after their variables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from strategies.checkpoint.states import SaveableState
from strategies.core.values import Array
from strategies.optimizers import Optimizer
from strategies.variables.variable import Variable

_SLOT = re.compile(r"(slots/([0-9]+)|slots_of/(.+))/(\w+)").fullmatch


class OptimizerState(SaveableState):
    """An optimizer's state: its counts and slots. Slots may not exist yet when it is restored.

    `variables` are those in the same checkpoint by path. Their slots are "slots_of/PATH/SLOT" in
    the file, and are created when they are restored. Slots of other variables are numbered in the
    order of the first updates, "slots/0/SLOT", and restored when the first step creates them.
    Existing slots that aren't in the file are reset.
    """

    def __init__(self, path: str, optimizer: Optimizer, variables: Mapping[str, Variable]) -> None:
        super().__init__(path, optimizer)
        self.optimizer, self.variables = optimizer, variables

    def save(self) -> Mapping[str, Array]:
        """The optimizer's tensors, with paths in place of the numbers of variables."""
        tensors = super().save()
        numbers = [int(slot[2]) for slot in map(_SLOT, tensors) if slot]
        prefixes = self._prefixes(1 + max(numbers, default=0))
        return {
            f"{prefixes[int(slot[2])]}/{slot[4]}" if (slot := _SLOT(name)) else name: array
            for name, array in tensors.items()
        }

    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """Slots that this optimizer doesn't have, or other shapes and dtypes."""
        wanted: dict[str, Any] = {
            name: array for name, array in self.save().items() if name in tensors or not _SLOT(name)
        }
        known = dict(tensors)
        for name in tensors:
            slot = _SLOT(name)
            if slot is None or slot[4] not in self.optimizer.rule.slots:
                continue
            if slot[3] in self.variables:
                wanted[name] = self.variables[slot[3]]
            elif slot[2] and name not in wanted:
                del known[name]  # its variable is unknown before the first step
        return self._differences(wanted, known)

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Pass the tensors to the optimizer, with its own numbers of variables."""
        slots = {name: slot for name in tensors if (slot := _SLOT(name))}
        names = self.optimizer.rule.slots
        for slot in slots.values():
            if slot[3]:
                # Creates the slots now: processes may number the variables differently.
                self.optimizer.slots_of(self.variables[slot[3]].storage, names)
        prefixes = self._prefixes(len(self.optimizer.values) + len(slots))
        numbers = {prefix: number for number, prefix in enumerate(prefixes)}
        super().restore(
            {
                f"slots/{numbers[slots[name][1]]}/{slots[name][4]}" if name in slots else name: each
                for name, each in tensors.items()
            }
        )

    def _prefixes(self, count: int) -> list[str]:
        """The prefixes of the slots' names in the file, by the optimizer's variable numbers."""
        paths = {
            self.optimizer.number_of(each.storage): path for path, each in self.variables.items()
        }
        unnamed = itertools.count()
        return [
            f"slots_of/{paths[number]}" if number in paths else f"slots/{next(unnamed)}"
            for number in range(count)
        ]
