"""States: how a variable or other stateful object is saved, checked and restored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from collectives import Communicator
from collectives.consistency.uncaught import raised_on_all
from strategies.core.same_error import compare
from strategies.core.values import Array, as_array
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


class State(ABC):
    """The state of `owner`, the object that `path` reaches from the checkpoint."""

    kept_by_strategy = False
    """Whether the strategy stores all of it, so that one process can restore it for all."""

    def __init__(self, path: str, owner: Any) -> None:
        self.path, self.owner = path, owner

    def full_name(self, relative: str) -> str:
        """The name in the file of the tensor with this relative name."""
        return f"{self.path}/{relative}" if relative else self.path

    @abstractmethod
    def save(self) -> Mapping[str, Array]:
        """The tensors by relative name. Collective."""

    @abstractmethod
    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """A line for each reason why these tensors can't be restored. Collective."""

    @abstractmethod
    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Restore tensors that have no problems. Collective."""

    def _differences(self, wanted: Mapping[str, Any], tensors: Mapping[str, Array]) -> list[str]:
        """A line for each name, shape or dtype that differs from the wanted one."""
        lines = [f"{self.full_name(name)}: is missing" for name in wanted if name not in tensors]
        for name, array in tensors.items():
            if name not in wanted:
                lines.append(f"{self.full_name(name)}: is in the file, but not in the program")
            elif (array.shape, array.dtype) != (wanted[name].shape, wanted[name].dtype):
                lines.append(
                    f"{self.full_name(name)}: {_kind(array)}, wanted {_kind(wanted[name])}"
                )
        return lines


def _kind(array: Any) -> str:
    return f"{array.dtype} of shape {array.shape}"


class VariableState(State):
    """A variable's value; of ON_READ the replicas' aggregate, which `assign` distributes."""

    kept_by_strategy = True

    def __init__(self, path: str, variable: Variable) -> None:
        super().__init__(path, variable)
        self.variable = variable

    def save(self) -> Mapping[str, Array]:
        """The value."""
        return {"": self.variable.read_value()}

    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """Another shape or dtype. Not collective."""
        return self._differences({"": self.variable}, tensors)

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Assign the value."""
        self.variable.assign(tensors[""])


class SaveableState(State):
    """The state of an object with the protocol `Saveable`."""

    def __init__(self, path: str, saveable: Saveable) -> None:
        super().__init__(path, saveable)
        self.saveable = saveable

    def save(self) -> Mapping[str, Array]:
        """The object's tensors."""
        return {name: as_array(each, name) for name, each in self.saveable.saved_tensors().items()}

    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """The error of the object's `check_tensors`, or differences from its present tensors."""
        check = getattr(self.saveable, "check_tensors", None)
        if check is None:
            return self._differences(self.save(), tensors)
        try:
            check(tensors)
        except ValueError as error:
            return [f"{self.path}: {error}"]
        return []

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Pass the tensors to the object."""
        self.saveable.restore_tensors(tensors)


def refuse_different_names(communicator: Communicator, what: str, names: Iterable[str]) -> None:
    """The same ValueError on every rank where the ranks' names differ. Collective."""
    own = sorted(names)
    reports = compare(communicator, f"{what}: the states ", ", ".join(own), own, what)
    if reports is not None:
        everywhere = set.intersection(*map(set, reports))
        extra = [[name for name in report if name not in everywhere] for report in reports]
        lines = [f"  rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(extra)]
        text = "\n".join([f"{what}: some ranks have states that others lack", *lines])
        raise raised_on_all(ValueError(text), communicator.rank)
