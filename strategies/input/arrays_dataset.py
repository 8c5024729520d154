"""A dataset of arrays in memory: its elements are their slices along axis 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from strategies.core import nest
from strategies.core.values import as_array
from strategies.input.batches import length_of
from strategies.input.dataset import Dataset, Place, Transformed


def make_numpy_dataset(numpy_input: Any) -> ArraysDataset:
    """The rows of a nest of arrays, as `tf.data.Dataset.from_tensor_slices`.

    Each element is the nest with one slice along axis 0 of each array. Raises ValueError where
    an array has no axis 0, or their lengths differ.
    """
    arrays = nest.map_leaves(lambda leaf: as_array(leaf, "numpy_input"), numpy_input)
    return ArraysDataset(_Numbers(length_of(arrays)), arrays)


class _Numbers(Dataset):
    """The numbers from 0 to `length` − 1."""

    def __init__(self, length: int) -> None:
        self._length = length

    def elements(self, place: Place) -> Iterator[int]:
        return iter(range(self._length))


@dataclass(frozen=True, eq=False)
class ArraysDataset(Transformed):
    """Slices of a nest of arrays, by the numbers that `source` gives.

    What is shuffled, batched and repeated are the numbers; a whole batch is cut out at once.
    """

    arrays: Any

    def elements(self, place: Place) -> Iterator[Any]:
        """The slices of one iteration."""
        for chosen in self.source.elements(place):
            yield nest.map_leaves(itemgetter(chosen), self.arrays)

    def into(self, make: Callable[..., Dataset], *arguments: Any) -> ArraysDataset:
        """The same arrays, by other numbers."""
        return replace(self, source=make(self.source, *arguments))
