"""What all parts of Keras training share: the ranks, and the mean of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from collectives import CollectiveMismatchError, Communicator
from collectives.arrays.kinds import to_numpy
from collectives.compression import CompressedReducer, ListName
from collectives.consistency.uncaught import raised_on_all
from strategies.core.options import ReduceOp

Positions = tuple[int, ...]

_ENDED = 0
"""The number of ranks that have no further batch; optimizers have numbers from 1."""


class Training:
    """The ranks that train a model in step."""

    def __init__(self, owner: Any, *, reduces: bool = True) -> None:
        """`owner` is the strategy, whose rank 0 is the chief.

        reduces: whether gradients, metrics and statistics are reduced, and batches split, by this
            package. Keras's TensorFlow backend has that done by the `tf.distribute` strategy.
        """
        self.owner, self.reduces = owner, reduces
        self.communicator: Communicator = owner.communicator
        self.is_chief: bool = owner.is_chief
        self.rows: int | None = None
        """The number of rows that this rank's current step has; None outside of Keras's steps."""
        self.rows_read = 0
        """The number of rows of the piece that this rank's data gave last."""
        self.chiefs_error: Exception | None = None
        """What a callback of the chief alone has raised since the last exchange."""
        self.in_epoch = False
        """Whether the ranks take the steps of an epoch of `fit`."""
        self.host_functions: dict[tuple[int, Positions, float], Any] = {}
        """What compiled programs call, by optimizers' numbers, their variables and weights."""
        self.step: Any = None
        """Of Keras's TensorFlow backend, what gradients' reduction needs of the current step."""
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._next_numbers = count(1)
        self._names: dict[tuple[int, Positions], ListName] = {}

    @property
    def weight(self) -> float:
        """How much this rank's gradients count: by the rows of its batch."""
        return 1.0 if self.rows is None else float(self.rows)

    def number_of(self, optimizer: Any) -> int:
        """The optimizer's number, from 1, in the order in which the program names them."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next_numbers)
        return self._numbers[optimizer]

    def exchange(self, number: int, weight: float, absent: int = 0) -> tuple[float, int]:
        """The factor of this rank's gradients in a mean, and the sum of `absent`. Collective.

        number: of the optimizer. The factor is 1 on all ranks where their weights are equal. Raises
        CollectiveMismatchError on every rank where their optimizers differ, and ValueError where
        the data of some ranks have ended.
        """
        given = np.array([weight, absent, number, number * number], float)
        total, absent_anywhere, numbers, squares = self.communicator.all_reduce(given)
        size = self.communicator.size
        if numbers * numbers != squares * size:  # Equal only where all numbers are equal.
            raise raised_on_all(self._difference(number), self.communicator.rank)
        factor = weight * size / total if total else 0.0
        return factor, int(absent_anywhere)

    @contextmanager
    def outside_of_epoch(self) -> Iterator[None]:
        """A context for calls that a program makes within an epoch, which don't end it."""
        within, rows_read = self.in_epoch, self.rows_read
        self.in_epoch = False
        try:
            yield
        finally:
            self.in_epoch, self.rows_read = within, rows_read

    def end_epoch(self) -> None:
        """Raise ValueError on every rank where others have further batches. Collective."""
        if self.in_epoch:
            self.in_epoch = False
            self.exchange(_ENDED, 0.0)

    def _difference(self, number: int) -> Exception:
        """The error of ranks whose numbers differ. Collective."""
        numbers = self.communicator.all_gather_object(number)
        ended = [rank for rank, each in enumerate(numbers) if each == _ENDED]
        if not ended:
            calls = tuple(f"optimizer {each} of the scope" for each in numbers)
            text = "the ranks reduced the gradients of different optimizers"
            return CollectiveMismatchError(text, calls)
        others = [rank for rank in range(len(numbers)) if rank not in ended]
        return ValueError(
            f"fit: the ranks' data have different numbers of batches: ranks {others} have a further"
            f" batch, ranks {ended} have none. Every rank must be given the same global batches"
        )

    def mean_into(
        self, arrays: Sequence[Any], out: Sequence[Any], optimizer: int, positions: Positions
    ) -> None:
        """Write the mean over the ranks of NumPy arrays or torch tensors. Collective.

        out: may be the arrays themselves.
        optimizer, positions: the optimizer's number, and which of its variables have the gradients.
        """
        if self.owner.compresses:
            compressed: CompressedReducer = self.owner.compressed
            name = self.list_name(optimizer, positions)
            means = compressed.all_reduce_many(arrays, "mean", of=name)
        elif self.owner.reduces_plainly:
            self.communicator.all_reduce_many(arrays, "mean", out=out)
            return
        else:
            means = self.owner.all_reduce_arrays(arrays, ReduceOp.MEAN)
        for target, mean in zip(out, means, strict=True):
            to_numpy(target)[...] = to_numpy(mean)

    def list_name(self, optimizer: int, positions: Positions) -> ListName:
        """The name of gradients that are compressed together, as long as this object lives."""
        name = self._names.get((optimizer, positions))
        if name is None:
            text = f"gradients {positions} of optimizer {optimizer}"
            name = self._names[optimizer, positions] = ListName(text)
            finalize(self, self.owner.compressed.forget, name).atexit = False
        return name
