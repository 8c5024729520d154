"""One rank's memory for one size, and its use in a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from bench.problem import Array, DType, Problem

Allocate: TypeAlias = Callable[[int, DType], Array]

# No element of these bytes is a value that a collective of small integers returns.
_POISON = 0xA5


class Buffers:
    """One rank's input and output: allocated once, every page touched before the measurement."""

    def __init__(self, give: Callable[[], Array | None], send: Array, recv: Array) -> None:
        self._give, self.send, self.recv = give, send, recv
        self.reset()

    def reset(self) -> None:
        """Restore the inputs, and poison the outputs so that no old result counts as a new one."""
        given = self._give()
        if given is not None:
            self.send[...] = given
        # By assignment, which GPU arrays support as well.
        self.recv.view(np.uint8)[...] = _POISON


@dataclass(frozen=True)
class Task:
    """The memory of a call; in place, the result overwrites the input."""

    problem: Problem
    rank: int
    buffers: Buffers
    in_place: bool

    @property
    def send(self) -> Array:
        """This rank's input."""
        return self.buffers.send

    @property
    def out(self) -> Array:
        """The output, unless the call returns new memory."""
        return self.buffers.send if self.in_place else self.buffers.recv

    @property
    def on_root(self) -> bool:
        """Whether this rank is the root."""
        return self.rank == self.problem.root
