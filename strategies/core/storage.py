"""Storage: the memory of a variable's value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from collectives.cuda.runtime import on_gpu
from strategies.core.values import Array, as_array

Change: TypeAlias = Callable[..., None]
"""`change(array, *operands)` changes the array in place. A function of a module, so that it can be
sent to the process that holds the array."""


class Storage(ABC):
    """One variable's value."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    on_gpu = False
    """Whether the value is a device array, which operators and ufuncs change on its GPU."""

    changes_together = False
    """Whether `change` is collective."""

    @abstractmethod
    def view(self) -> Array:
        """The value, read-only for the caller and valid until the next change."""

    def read(self) -> Array:
        """A copy of the value."""
        return self.view().copy()

    def rows(self, indices: Array) -> Array:
        """Copies of the rows with these numbers, all of which exist."""
        rows: Array = self.view()[indices]
        return rows

    @abstractmethod
    def change(self, change: Change, *operands: Any) -> None:
        """Change every copy of the value; collective where replicas share copies.

        All replicas give the same change and operands.
        """

    def update(self, change: Change, *operands: Any) -> None:
        """As `change`, where it is an optimizer's step."""
        self.change(change, *operands)

    def part_of(self, array: Array) -> Array:
        """What this process updates of an array of the value's shape: all, or a share of it."""
        return array

    def own_part(self) -> Array:
        """`part_of` the value, to be changed in place; ranks synchronize before it is read.

        TypeError where other processes keep the value.
        """
        raise TypeError(f"a {type(self).__name__} can't be changed in place")

    def zeros(self) -> Storage:
        """A second value, kept as this one is: zeros of the same shape. Collective.

        TypeError where slots are kept in another way.
        """
        raise TypeError(f"a {type(self).__name__} has no second value like it: see `slot`")

    def slot(self, optimizer: Any, name: str, initial: Array | None) -> Storage:
        """An array that an optimizer keeps for the value; None: of zeros. Collective."""
        made = self.zeros()
        if initial is not None:
            made.change(assign, as_array(initial, name, gpu=made.on_gpu))
        return made

    def updates_by(self, optimizer: Any) -> int:
        """The number of the optimizer's steps that have changed the value, or others with it."""
        steps: int = optimizer.iterations
        return steps


class LocalStorage(Storage):
    """An array in this process; if mirrored, every replica applies the same changes to its own."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.shape, self.dtype, self.on_gpu = array.shape, array.dtype, on_gpu(array)

    def view(self) -> Array:
        """The array itself."""
        return self._array

    def change(self, change: Change, *operands: Any) -> None:
        """Change the array."""
        change(self._array, *operands)

    def own_part(self) -> Array:
        """The array itself."""
        return self._array

    def zeros(self) -> LocalStorage:
        """An array of this process's own."""
        return LocalStorage(np.zeros_like(self._array))


class ReplacedArrays(Protocol):
    """Arrays that a program replaces in each step, and that replicas average."""

    def step(self, arrays: Sequence[Any]) -> None:
        """Replace the arrays by those that a step of this replica gave."""

    def restore(self, arrays: Sequence[Array]) -> None:
        """Replace the arrays by equal ones on all replicas."""

    def averages(self) -> list[Array] | None:
        """The arrays after an averaging; None where there was none since this was last called."""


def assign(array: Array, value: Array) -> None:
    """Replace all elements."""
    array[...] = value


def assign_add(array: Array, value: Array) -> None:
    """Add."""
    np.add(array, value, out=array, casting="same_kind")


def assign_sub(array: Array, value: Array) -> None:
    """Subtract."""
    np.subtract(array, value, out=array, casting="same_kind")
