"""The parts of a program that have state, and how each one's is saved, checked and restored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from collectives import Communicator
from collectives.consistency.uncaught import raised_on_all
from strategies.core.same_error import compare
from strategies.core.values import as_array
from strategies.variables.variable import Variable

Array = NDArray[Any]


@runtime_checkable
class Saveable(Protocol):
    """What an object must offer so that a checkpoint can hold it.

    Both calls are collective between the replicas, outside of `run`. An object may also have
    `check_tensors(tensors)`, not collective, which raises ValueError, and changes nothing, where
    `restore_tensors` couldn't take them. Without it, the names, shapes and dtypes must be those
    that `saved_tensors` gives at the time.
    """

    def saved_tensors(self) -> Mapping[str, Array]:
        """The state as whole arrays of numbers, the same on every rank.

        By names of the object's own, "" where there is a single one.
        """

    def restore_tensors(self, tensors: Mapping[str, Array], /) -> None:
        """Take the state from arrays of those names. They may be kept."""


class State(ABC):
    """One part's state in a checkpoint; `path` leads from the checkpoint to its `holder`."""

    kept_by_strategy = False
    """Whether the strategy keeps all of it, so that one process can restore it for the others."""

    def __init__(self, path: str, holder: Any) -> None:
        self.path, self.holder = path, holder

    def full_name(self, relative: str) -> str:
        """The name of one of its tensors in the file."""
        return f"{self.path}/{relative}" if relative else self.path

    @abstractmethod
    def save(self) -> Mapping[str, Array]:
        """The tensors by their relative names. Collective."""

    @abstractmethod
    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """What keeps these tensors from being restored, a line each. Collective."""

    @abstractmethod
    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Take the tensors, in which there is no problem. Collective."""

    def _differences(self, wanted: Mapping[str, Any], tensors: Mapping[str, Array]) -> list[str]:
        """Where names, shapes or dtypes differ from those wanted."""
        lines = [f"{self.full_name(name)}: is missing" for name in wanted if name not in tensors]
        for name, array in tensors.items():
            if name not in wanted:
                lines.append(f"{self.full_name(name)}: is in the file, but nothing here takes it")
            elif (array.shape, array.dtype) != (wanted[name].shape, wanted[name].dtype):
                lines.append(
                    f"{self.full_name(name)}: {_kind(array)}, wanted {_kind(wanted[name])}"
                )
        return lines


def _kind(array: Any) -> str:
    return f"{array.dtype} of shape {array.shape}"


class VariableState(State):
    """A variable's value: of ON_READ the replicas' aggregate, shared out again when restored."""

    kept_by_strategy = True

    def __init__(self, path: str, variable: Variable) -> None:
        super().__init__(path, variable)
        self.variable = variable

    def save(self) -> Mapping[str, Array]:
        """The value, outside of `run`."""
        return {"": self.variable.read_value()}

    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """Another shape or dtype; needs no traffic."""
        return self._differences({"": self.variable}, tensors)

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Assign the value, outside of `run`."""
        self.variable.assign(tensors[""])


class SaveableState(State):
    """The state of an object that speaks the protocol."""

    def __init__(self, path: str, saveable: Saveable) -> None:
        super().__init__(path, saveable)
        self.saveable = saveable

    def save(self) -> Mapping[str, Array]:
        """What the object gives."""
        return {name: as_array(each, name) for name, each in self.saveable.saved_tensors().items()}

    def problems(self, tensors: Mapping[str, Array]) -> list[str]:
        """What the object says itself, or where its present tensors differ."""
        check = getattr(self.saveable, "check_tensors", None)
        if check is None:
            return self._differences(self.save(), tensors)
        try:
            check(tensors)
        except ValueError as error:
            return [f"{self.path}: {error}"]
        return []

    def restore(self, tensors: Mapping[str, Array]) -> None:
        """Hand them to the object."""
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
