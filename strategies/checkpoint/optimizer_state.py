"""An optimizer's part of a checkpoint: its slots are named after the variables they belong to."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from strategies.checkpoint.states import SaveableState
from strategies.optimizers import Optimizer
from strategies.variables.variable import Variable

Array = NDArray[Any]

_SLOT = re.compile(r"(slots/([0-9]+)|slots_of/(.+))/(\w+)").fullmatch


class OptimizerState(SaveableState):
    """An optimizer's state: its counts, and slots, which may not exist yet when it is restored.

    Of `variables`, those in the same checkpoint by path, a slot's name in the file is
    "slots_of/PATH/SLOT"; they are made when they are restored. Others are numbered in the order of
    their first updates, "slots/0/SLOT", and restored when the first step makes them. Slots that
    exist and aren't in the file begin anew.
    """

    def __init__(self, path: str, optimizer: Optimizer, variables: Mapping[str, Variable]) -> None:
        super().__init__(path, optimizer)
        self.optimizer, self.variables = optimizer, variables

    def save(self) -> Mapping[str, Array]:
        """The optimizer's tensors; it numbers all variables, the file names them."""
        tensors = super().save()
        numbers = [int(slot[2]) for slot in map(_SLOT, tensors) if slot]
        heads = self._heads(1 + max(numbers, default=0))
        return {
            f"{heads[int(slot[2])]}/{slot[4]}" if (slot := _SLOT(name)) else name: array
            for name, array in tensors.items()
        }

    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """Other kinds of slots than this optimizer's, or other shapes and dtypes."""
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
                del known[name]  # its variable isn't known before the first step
        return self._differences(wanted, known)

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Hand them to the optimizer, by its own numbers."""
        slots = {name: slot for name in tensors if (slot := _SLOT(name))}
        names = self.optimizer.rule.slots
        for slot in slots.values():
            if slot[3]:
                # Made at once, since others may number the variables otherwise than this process.
                self.optimizer.slots_of(self.variables[slot[3]].storage, names)
        heads = self._heads(len(self.optimizer.values) + len(slots))
        numbers = {head: number for number, head in enumerate(heads)}
        super().restore(
            {
                f"slots/{numbers[slots[name][1]]}/{slots[name][4]}" if name in slots else name: each
                for name, each in tensors.items()
            }
        )

    def _heads(self, count: int) -> list[str]:
        """How the slots' names begin in the file, by the optimizer's numbers of their variables."""
        paths = {
            self.optimizer.number_of(each.storage): path for path, each in self.variables.items()
        }
        places = itertools.count()
        return [
            f"slots_of/{paths[number]}" if number in paths else f"slots/{next(places)}"
            for number in range(count)
        ]
