"""How a variable, an optimizer or another stateful object is saved, checked and restored."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from collectives import Communicator
from collectives.consistency.uncaught import raised_on_all
from strategies.checkpoint.tensor_file import CheckpointError
from strategies.core.same_error import by_rank, compare
from strategies.core.storage import LocalStorage
from strategies.core.values import Array, as_array
from strategies.optimizers import Optimizer
from strategies.variables.variable import Variable


@runtime_checkable
class Saveable(Protocol):
    """The protocol of an object that a checkpoint can save.

    Both methods are collective between the replicas, outside of `run`. An object may also have
    `check_tensors(tensors)`, not collective, which raises ValueError, without changing anything,
    for tensors that `restore_tensors` can't accept. Without it, names, shapes and dtypes must
    equal those that `saved_tensors` returns at that moment.
    """

    def saved_tensors(self) -> Mapping[str, Array]:
        """The state as whole numeric arrays by name, the same on every rank.

        The object chooses the names; "" for a single array.
        """

    def restore_tensors(self, tensors: Mapping[str, Array], /) -> None:
        """Set the state from arrays of those names. The object may keep the arrays."""


class State:
    """The state of `owner`, a `Saveable` that `path` reaches from the checkpoint."""

    def __init__(self, path: str, owner: Any) -> None:
        self.path, self.owner = path, owner

    @property
    def kept_by_strategy(self) -> bool:
        """Whether parameter servers store all of it, so that one process can restore it for all."""
        return False

    def full_name(self, relative: str) -> str:
        """The name in the file of the tensor with this relative name."""
        return f"{self.path}/{relative}" if relative else self.path

    def save(self) -> Mapping[str, Array]:
        """The tensors by relative name. Collective."""
        return {name: as_array(each, name) for name, each in self.owner.saved_tensors().items()}

    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """A line for each reason why these tensors can't be restored. Collective.

        The error of the owner's `check_tensors`, or differences from its present tensors.
        """
        check = getattr(self.owner, "check_tensors", None)
        if check is None:
            return self._differences(self.save(), tensors)
        try:
            check(tensors)
        except ValueError as error:
            return [f"{self.path}: {error}"]
        return []

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Restore tensors that have no problems. Collective."""
        self.owner.restore_tensors(tensors)

    def _differences(self, wanted: Mapping[str, Any], tensors: Mapping[str, Array]) -> list[str]:
        """A line for each name, shape or dtype that differs from the wanted one."""
        lines = [f"{self.full_name(name)}: is missing" for name in wanted if name not in tensors]
        for name, array in tensors.items():
            if name not in wanted:
                lines.append(f"{self.full_name(name)}: is in the file, but not in the program")
            elif (array.shape, array.dtype) != (wanted[name].shape, wanted[name].dtype):
                kinds = [f"{each.dtype} of shape {each.shape}" for each in (array, wanted[name])]
                lines.append(f"{self.full_name(name)}: {kinds[0]}, wanted {kinds[1]}")
        return lines


class VariableState(State):
    """A variable's value; of ON_READ the replicas' aggregate, which `assign` distributes."""

    @property
    def kept_by_strategy(self) -> bool:
        """Whether servers store it: of an ON_READ variable each worker has a value of its own."""
        return not isinstance(self.owner.storage, LocalStorage)

    def save(self) -> Mapping[str, Array]:
        """The value."""
        return {"": self.owner.numpy()}

    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """Another shape or dtype. Not collective."""
        return self._differences({"": self.owner}, tensors)

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Assign the value."""
        self.owner.assign(tensors[""])


def refuse_different_names(
    communicator: Communicator, what: str, states: Mapping[str, State]
) -> None:
    """The same ValueError on every rank where states or their owners differ. Collective."""
    own = sorted(f"{path}{_number(state)}" for path, state in states.items())
    reports = compare(communicator, f"{what}: the states ", ", ".join(own), own, what)
    if reports is not None:
        everywhere = set.intersection(*map(set, reports))
        extra = [[name for name in report if name not in everywhere] for report in reports]
        names = [", ".join(each) or "none" for each in extra]
        text = by_rank(f"{what}: some ranks have states that others lack", names)
        raise raised_on_all(ValueError(text), communicator.rank)


def _number(state: State) -> str:
    """The number of a variable or an optimizer, which has the same one on all ranks."""
    owner = state.owner
    if isinstance(state, VariableState) and owner.distributed:
        return f" (variable {owner.number})"
    series = getattr(owner, "series", None)
    return "" if series is None else f" (optimizer {series.first})"


def by_state(
    tensors: Mapping[str, Array], states: Mapping[str, State]
) -> tuple[dict[str, dict[str, Array]], list[str]]:
    """Each state's tensors by relative name, and the names of tensors that belong to no state.

    A tensor's name begins with its state's path.
    """
    found: dict[str, dict[str, Array]] = {path: {} for path in states}
    unknown = []
    for name, array in sorted(tensors.items()):
        parts = name.split("/")
        prefixes = ("/".join(parts[:length]) for length in range(1, len(parts) + 1))
        path = next((prefix for prefix in prefixes if prefix in found), None)
        if path is None:
            unknown.append(name)
        else:
            found[path][name[len(path) + 1 :]] = array
    return found, unknown


def check_fit(
    states: Mapping[str, State],
    parts: Mapping[str, Mapping[str, Array]],
    surplus: list[str],
    source: str,
) -> None:
    """CheckpointError, with a line for each tensor that can't be restored."""
    problems = [f"{name}: is in the file, but not in this Checkpoint" for name in surplus]
    for path, state in states.items():
        problems += state.problems(parts[path])
    if problems:
        raise CheckpointError("\n  ".join([f"{source} does not fit:", *problems]))


_SLOT = re.compile(r"(slots/([0-9]+)|slots_of/(.+))/(\w+)", re.DOTALL).fullmatch


class OptimizerState(State):
    """An optimizer's state: its counts and slots. Slots may not exist yet when it is restored.

    `variables` are those in the same checkpoint by path. Their slots are "slots_of/PATH/SLOT" in
    the file, and are created when they are restored. Slots of other variables are numbered,
    "slots/0/SLOT", in the order of the first updates; an outer optimizer's, of pytrees and torch
    modules, in the order in which these were made. They are restored when the first step creates
    them. Existing slots that aren't in the file are reset.
    """

    def __init__(self, path: str, optimizer: Optimizer, variables: Mapping[str, Variable]) -> None:
        super().__init__(path, optimizer)
        self.optimizer, self.variables = optimizer, variables

    def save(self) -> Mapping[str, Array]:
        """The optimizer's tensors, with paths in place of the numbers of variables."""
        tensors = super().save()
        named = self._named()
        taken = sorted(named)

        def prefix(number: int) -> str:
            if number in named:
                return f"slots_of/{named[number]}"
            return f"slots/{number - bisect_left(taken, number)}"

        return {
            f"{prefix(int(slot[2]))}/{slot[4]}" if (slot := _SLOT(name)) else name: array
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
        if any(slot[2] for slot in slots.values()):
            # Named variables that are updated later would take the numbers of those without names.
            # Those on servers have other numbers on workers.
            for variable in self.variables.values():
                if isinstance(variable.storage, LocalStorage):
                    self.optimizer.slots_of(variable.storage, ())
        for slot in slots.values():
            if slot[3]:
                # Creates the slots now: processes may number the variables differently.
                self.optimizer.slots_of(self.variables[slot[3]].storage, names)
        named = self._named()
        taken = sorted(named)
        number_of = {path: number for number, path in named.items()}

        def number(slot: re.Match[str]) -> int:
            if slot[3]:
                return number_of[slot[3]]
            found = int(slot[2])
            for each in taken:  # a named variable's number
                found += each <= found
            return found

        super().restore(
            {
                f"slots/{number(slots[name])}/{slots[name][4]}" if name in slots else name: each
                for name, each in tensors.items()
            }
        )

    def _named(self) -> dict[int, str]:
        """The paths of variables in the checkpoint, by the optimizer's numbers of them."""
        numbers = {
            path: self.optimizer.number_of(each.storage) for path, each in self.variables.items()
        }
        return {number: path for path, number in numbers.items() if number is not None}
