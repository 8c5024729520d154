"""Which rows of a global batch a rank gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from strategies.core.same_error import raise_on_all
from strategies.keras.training import Training


class Share(NamedTuple):
    """Which rows of a global batch a rank gets."""

    rank: int
    size: int

    def of(self, length: int) -> slice:
        """The rows of a batch of that length."""
        step = -(-length // self.size)
        return slice(min(self.rank * step, length), min((self.rank + 1) * step, length))

    def cut(self, batch: Any) -> Any:
        """The rank's part of every array in a nest. ValueError for different numbers of rows."""
        rows = self.of(length_of(batch))
        return keras.tree.map_structure(lambda each: None if each is None else each[rows], batch)


def share_of(training: Training) -> Share:
    """That of this rank."""
    return Share(training.communicator.rank, training.communicator.size)


def length_of(batch: Any) -> int:
    """The number of rows of a nest of arrays. ValueError where they have different ones."""
    arrays = [each for each in keras.tree.flatten(batch) if each is not None]
    lengths = {tuple(each.shape[:1]) for each in arrays}
    if len(lengths) != 1 or () in lengths:
        shapes = ", ".join(str(tuple(each.shape)) for each in arrays)
        raise ValueError(
            f"the arrays of a batch have the shapes {shapes}: must have equally many rows"
        )
    return int(lengths.pop()[0])


def refuse_other_rows(
    training: Training, outputs: Any, lengths: Sequence[int], steps: int | None
) -> None:
    """ValueError on every rank where `predict` gave other numbers of rows than it got. Collective.

    The ranks' rows are joined in the order of those of the data. `lengths` are those of the global
    batches that were read; with `steps` some at the end may not have been used.
    """
    parts = map(share_of(training).of, lengths)
    own = [part.stop - part.start for part in parts]
    least = len(own) if steps is None else min(steps, len(own))
    possible = {sum(own[:number]) for number in range(least, len(own) + 1)}
    found = [len(each) for each in keras.tree.flatten(outputs)]
    error = None
    if not possible.issuperset(found):
        error = ValueError(
            f"predict: the model gives {found} rows for {sum(own)}: must have as many"
        )
    raise_on_all(training.communicator, "predict", error)
