"""One rank's memory for one size, and what a call is given of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from bench.problem import Array, DType, Problem

Allocate: TypeAlias = Callable[[int, DType], Array]

# No element made of this byte is a value that a collective of small integers gives.
_POISON = 0xA5


class Buffers:
    """What one rank sends and receives: allocated once, every page touched before the clock."""

    def __init__(self, give: Callable[[], Array | None], send: Array, recv: Array) -> None:
        self._give, self.send, self.recv = give, send, recv
        self.reset()

    def reset(self) -> None:
        """Fresh inputs, and outputs in which no old result can pass for a new one."""
        given = self._give()
        if given is not None:
            self.send[...] = given
        # By assignment, which a GPU's arrays have as well.
        self.recv.view(np.uint8)[...] = _POISON


@dataclass(frozen=True)
class Task:
    """What a call works on; in place, the result is written where the input was."""

    problem: Problem
    rank: int
    buffers: Buffers
    in_place: bool

    @property
    def send(self) -> Array:
        """What this rank gives."""
        return self.buffers.send

    @property
    def out(self) -> Array:
        """Where a result goes that isn't new memory."""
        return self.buffers.send if self.in_place else self.buffers.recv

    @property
    def on_root(self) -> bool:
        """Whether this rank is the root."""
        return self.rank == self.problem.root
