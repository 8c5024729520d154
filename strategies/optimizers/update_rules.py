"""The update rules of optimizers: pure arithmetic on one variable's arrays.

They depend on neither variables nor replicas, so that they can be applied by every replica, by the
owner of a shared copy, or by a parameter server. Results are those of `tf.keras.optimizers`, to the
rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from collectives.cuda.runtime import on_gpu
from strategies.core.values import Array

Slots: TypeAlias = Mapping[str, Array]
"""The arrays that an optimizer keeps for a value, by name."""

# Temporary arrays of a block stay in the cache, and in memory that the process has already.
_BLOCK_ELEMENTS = 64 << 10


class UpdateRule(ABC):
    """One step's rule, with its numbers. Small and picklable."""

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """The names of the arrays that the rule keeps for each variable, zeros at first."""

    def apply(self, value: Array, gradient: Array, slots: Slots, iteration: int) -> None:
        """Change the value, and the slots, in place; the gradient may be overwritten.

        All arrays have the variable's shape and dtype, or are equal parts of such; iterations count
        from 1.
        """
        # Blocks on a GPU would only be more launches.
        if value.size <= _BLOCK_ELEMENTS or on_gpu(value):
            self._apply(value, gradient, slots, iteration)
            return
        for own, change, *kept in _blocks([value, gradient, *slots.values()]):
            self._apply(own, change, dict(zip(slots, kept, strict=True)), iteration)

    @abstractmethod
    def _apply(self, value: Array, gradient: Array, slots: Slots, iteration: int) -> None:
        """As `apply`, element by element."""

    def rows_step(self, values: Array) -> Array | None:
        """The decrease of rows whose gradient is `values`; None if the rule changes other rows too.

        As in Keras 3, only a rule without slots changes no rows but those that have a gradient.
        """
        return None


def _blocks(arrays: list[Array]) -> Iterator[list[Array]]:
    """Views of the arrays' elements, block by block where their memory allows it."""
    size = arrays[0].size
    if not all(array.flags.c_contiguous for array in arrays):
        yield arrays
        return
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, size, _BLOCK_ELEMENTS):
        yield [array[start : start + _BLOCK_ELEMENTS] for array in flat]


@dataclass(frozen=True)
class DescentRule(UpdateRule):
    """Gradient descent, with momentum, also Nesterov's (Sutskever et al. 2013)."""

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The velocity, where there is momentum."""
        return ("velocity",) if self.momentum else ()

    def _apply(self, value: Array, gradient: Array, slots: Slots, iteration: int) -> None:
        """Move against the gradient, or on with the velocity."""
        gradient *= gradient.dtype.type(self.learning_rate)
        if not self.momentum:
            value -= gradient
            return
        momentum = gradient.dtype.type(self.momentum)
        velocity = slots["velocity"]
        velocity *= momentum
        velocity -= gradient
        value += momentum * velocity - gradient if self.nesterov else velocity

    def rows_step(self, values: Array) -> Array | None:
        """The gradient times the learning rate, where there is no momentum."""
        return None if self.momentum else values * values.dtype.type(self.learning_rate)


@dataclass(frozen=True)
class AdaptiveMomentsRule(UpdateRule):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980)."""

    learning_rate: float
    beta_1: float
    beta_2: float
    epsilon: float

    @property
    def slots(self) -> tuple[str, ...]:
        """The running means of the gradient and of its square."""
        return ("mean", "square")

    def _apply(self, value: Array, gradient: Array, slots: Slots, iteration: int) -> None:
        """Move against the running mean, in units of the root of the mean square.

        The parts of a complex number are numbers of their own, as torch's Adam has them.
        """
        if value.dtype.kind == "c":
            for part in (np.real, np.imag):
                parts = {name: part(slot) for name, slot in slots.items()}
                self._apply(part(value), part(gradient), parts, iteration)
            return
        number = gradient.dtype.type
        mean, square = slots["mean"], slots["square"]
        mean += (gradient - mean) * number(1 - self.beta_1)
        square += (gradient * gradient - square) * number(1 - self.beta_2)
        correction = (1 - self.beta_2**iteration) ** 0.5 / (1 - self.beta_1**iteration)
        step = mean * number(self.learning_rate * correction)
        value -= step / (np.sqrt(square) + number(self.epsilon))
