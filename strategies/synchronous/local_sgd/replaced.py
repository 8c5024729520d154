"""Arrays that a program replaces in each step, such as those of JAX, which don't change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strategies.core.storage import assign
from strategies.core.values import Array
from strategies.synchronous.local_sgd.averaging import Averaging, ReplicaStorage


class _ReplacedStorage(ReplicaStorage):
    """One array, which is copied only when the ranks average."""

    is_numbered = True

    def __init__(self, array: Array) -> None:
        super().__init__(array)
        self._newer: Any = None
        self.averaged = False
        """Whether the replicas have agreed on a value since the last step."""

    def replace(self, array: Any) -> None:
        """Take the array that a step gave."""
        self._newer, self.averaged = array, False

    def view(self) -> Array:
        """The value after the last step, or the last averaging."""
        if self._newer is not None:
            self._array[...] = self._newer
            self._newer = None
        return self._array

    def settle(self) -> None:
        """The replicas agree again."""
        super().settle()
        self._newer, self.averaged = None, True


class AveragedArrays:
    """The arrays of one owner, which the replicas average with the other values."""

    def __init__(
        self, averaging: Averaging, arrays: Sequence[Array], end_step: Callable[[], None]
    ) -> None:
        """`end_step` is called after each step."""
        self._averaging, self._end_step = averaging, end_step
        self._values = [_ReplacedStorage(each) for each in arrays]
        for value in self._values:
            averaging.add(value)

    def step(self, arrays: Sequence[Any]) -> None:
        """Replace the arrays by those of a step; at the end of a round the ranks average."""
        self._averaging.begin_step(self._values)
        for value, array in zip(self._values, arrays, strict=True):
            value.replace(array)
        self._end_step()

    def restore(self, arrays: Sequence[Array]) -> None:
        """Replace the arrays by equal ones on all replicas, on which they agree."""
        for value, array in zip(self._values, arrays, strict=True):
            value.change(assign, array)
            value.averaged = False

    def averages(self) -> list[Array] | None:
        """The arrays after an averaging; None where there was none since this was last called."""
        if not any(value.averaged for value in self._values):
            return None
        for value in self._values:
            value.averaged = False
        return [value.view() for value in self._values]
