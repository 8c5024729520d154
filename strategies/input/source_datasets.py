"""Datasets that read arrays in memory or files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from os import PathLike
from typing import Any

from strategies.core import nest
from strategies.core.values import as_array
from strategies.input.batches import length_of
from strategies.input.dataset import Dataset, Epoch, Transformed


def make_numpy_dataset(numpy_input: Any) -> ArraysDataset:
    """The rows of a nest of arrays, as `tf.data.Dataset.from_tensor_slices`.

    Each element is the nest with one slice along axis 0 of each array. Raises ValueError where
    an array has no axis 0 or the lengths of axis 0 differ.
    """
    arrays = nest.map_leaves(lambda leaf: as_array(leaf, "numpy_input"), numpy_input)
    return ArraysDataset(_Indices(length_of(arrays)), arrays)


class _Indices(Dataset):
    """The integers from 0 to `length` − 1."""

    def __init__(self, length: int) -> None:
        self._length = length

    def elements(self, epoch: Epoch) -> Iterator[int]:
        return iter(range(self._length))


@dataclass(frozen=True, eq=False)
class ArraysDataset(Transformed):
    """Slices along axis 0 of a nest of arrays, by the indices that `source` yields.

    Shuffles, batches and repeats act on the indices; a whole batch is one indexing operation.
    """

    arrays: Any

    def elements(self, epoch: Epoch) -> Iterator[Any]:
        """The slices of one epoch."""
        for indices in self.source.elements(epoch):
            yield nest.map_leaves(itemgetter(indices), self.arrays)

    def transform(self, make: Callable[..., Dataset], *arguments: Any) -> ArraysDataset:
        """The same arrays with transformed indices."""
        return replace(self, source=make(self.source, *arguments))


class FileDataset(Dataset):
    """The elements of `read(file)` for each file in turn: batches, or examples to be batched.

    Supports `AutoShardPolicy.FILE` without `tf.data`: rank r of W reads the files r, r + W,
    r + 2W, … The order of the files must be the same on every rank: sort directory listings.
    Raises TypeError where `files` is a single path or `read` isn't callable.
    """

    def __init__(
        self, files: Iterable[str | PathLike[str]], read: Callable[[Any], Iterable[Any]]
    ) -> None:
        if isinstance(files, str | PathLike):
            raise TypeError(f"files={files!r} is one path: must be a list of paths")
        if not callable(read):
            raise TypeError(f"read={read!r}: must be a function of a path")
        self._files, self._read = tuple(files), read

    @property
    def files(self) -> tuple[str | PathLike[str], ...]:
        """The files, in reading order."""
        return self._files

    def elements(self, epoch: Epoch) -> Iterator[Any]:
        """The elements of all files."""
        for file in self._files:
            yield from self._read(file)

    def auto_shard(self, num_shards: int, index: int) -> FileDataset:
        """The dataset of the files index, index + num_shards, … only."""
        return FileDataset(self._files[index::num_shards], self._read)
