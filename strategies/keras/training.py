"""What all parts of Keras training share: the ranks, and the mean of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives import Communicator

Reduce = Callable[[Sequence[Any]], Sequence[Any]]


class Training:
    """The ranks that train a model in step."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        is_chief: bool,
        owner: Any = None,
        mean: Reduce | None = None,
        reduces: bool = True,
    ) -> None:
        """Take a communicator whose rank 0 is the chief.

        owner: the strategy, for those that look for the strategy of a model.
        mean: reduces arrays to their mean over the ranks, where `collectives` doesn't choose how.
        reduces: whether gradients, metrics and statistics are reduced, and batches split, by this
            package. Keras's TensorFlow backend has that done by the `tf.distribute` strategy.
        """
        self.reduces = reduces
        self.communicator, self.owner = communicator, owner
        self.is_chief = is_chief
        self.rows: int | None = None
        """The number of rows that this rank's current step has; None outside of Keras's steps."""
        self.rows_read = 0
        """The number of rows of the piece that this rank's data gave last."""
        self.step: Any = None
        """Of Keras's TensorFlow backend, what gradients' reduction needs of the current step."""
        self.host_function: Any = None
        """The function that compiled programs call, made when it is first needed."""
        self._mean = mean

    @property
    def weight(self) -> float:
        """How much this rank's gradients count: by the rows of its batch."""
        return 1.0 if self.rows is None else float(self.rows)

    def exchange(self, weight: float, absent: int = 0) -> tuple[float, int]:
        """The factor of this rank's gradients in a mean, and the sum of `absent`. Collective.

        The factor is 1 on all ranks where their weights are equal.
        """
        total, absent_anywhere = self.communicator.all_reduce(np.array([weight, absent], float))
        factor = weight * self.communicator.size / total if total else 0.0
        return factor, int(absent_anywhere)

    def mean_into(self, arrays: Sequence[Any], out: Sequence[Any]) -> None:
        """Write the mean over the ranks of NumPy arrays or torch tensors. Collective.

        `out` may be the arrays themselves.
        """
        if self._mean is None:
            self.communicator.all_reduce_many(arrays, "mean", out=out)
            return
        for target, mean in zip(out, self._mean(arrays), strict=True):
            target[...] = mean
