"""Dataset: a re-iterable of elements with `tf.data`'s batch, shuffle, repeat and with_options.

For scripts that write `make_numpy_dataset(x).shuffle(1000).batch(64)`, and for datasets of files.
The order of an iteration depends on the seed and the iteration's number only. Ranks that iterate
equally often get the same order, however far they read ahead.
"""

from __future__ import annotations

import operator
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from operator import itemgetter
from os import PathLike
from typing import Any, TypeVar

import numpy as np

from strategies.core import nest
from strategies.core.values import as_array, whole_number
from strategies.input.batches import columns_of, length_of
from strategies.input.options import Options

Epoch = tuple[int, ...]  # the number of the iteration, then those of nested repeats
Self = TypeVar("Self", bound="Dataset")
Derived = TypeVar("Derived", bound="Transformed")


class Dataset(ABC):
    """Elements that can be iterated any number of times, as `tf.data.Dataset`."""

    files: Sequence[Any] | None = None
    """The files that the dataset reads; None where it reads none."""

    batch_size: int | None = None
    """The number of examples in a full batch; None where it is unknown."""

    is_shuffled = False
    """Whether a shuffle is part of the dataset, so that a seed has an effect."""

    is_infinite = False
    """Whether the dataset is known to have no end."""

    def __iter__(self) -> Iterator[Any]:
        iterations = self.__dict__.setdefault("_iterations", count())
        return self.elements((next(iterations),))

    @abstractmethod
    def elements(self, epoch: Epoch) -> Iterator[Any]:
        """The elements of one epoch."""

    def options(self) -> Any:
        """The options set by `with_options`, or the defaults."""
        return Options()

    def auto_shard(self: Self, num_shards: int, index: int) -> Self:
        """The dataset of the files index, index + num_shards, … only."""
        return self

    def with_seed(self: Self, seed: int, offset: int) -> Self:
        """`seed` for shuffles that have none, and `offset` added to the seed of every shuffle."""
        return self

    def transform(self, make: Callable[..., Dataset], *arguments: Any) -> Dataset:
        """`make(self, *arguments)`; subclasses may have a faster equivalent."""
        return make(self, *arguments)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Elements stacked along a new axis 0, `batch_size` at a time.

        The last batch is shorter or, with drop_remainder, dropped. Raises ValueError where
        batch_size isn't positive, and while iterating where shapes differ; TypeError where it is no
        integer.
        """
        return self.transform(_Batched, batch_size, drop_remainder)

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
    ) -> Dataset:
        """Shuffle: each element is drawn at random from a buffer of the next `buffer_size` ones.

        A buffer_size of None holds all elements. Without a seed the order is random, but the same
        on all ranks where a distributed dataset splits each global batch between them. Raises
        ValueError for a buffer_size that isn't positive, or None for an infinite dataset, TypeError
        for one that is no integer.
        """
        return self.transform(_Shuffled, buffer_size, seed, reshuffle_each_iteration is not False)

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat the elements `count` times, or infinitely for None or −1.

        Raises ValueError for a count below −1, TypeError for one that is no integer.
        """
        number = -1 if count is None else whole_number("count", count, -1)
        return self.transform(_Repeated, None if number == -1 else number)

    def with_options(self, options: Any) -> Dataset:
        """Set options; an object with the attributes of `tf.data.Options` is accepted."""
        return self.transform(_WithOptions, options)


@dataclass(eq=False)
class Transformed(Dataset):
    """A dataset derived from another, whose properties it inherits."""

    source: Dataset

    def __post_init__(self) -> None:
        source = self.source
        self.files, self.batch_size = source.files, source.batch_size
        self.is_shuffled, self.is_infinite = source.is_shuffled, source.is_infinite

    def options(self) -> Any:
        """The source's."""
        return self.source.options()

    def auto_shard(self: Derived, num_shards: int, index: int) -> Derived:
        """Apply to the source."""
        return replace(self, source=self.source.auto_shard(num_shards, index))

    def with_seed(self: Derived, seed: int, offset: int) -> Derived:
        """Apply to the source."""
        return replace(self, source=self.source.with_seed(seed + 1, offset))


@dataclass(eq=False)
class _Batched(Transformed):
    size: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_size = self.size = whole_number("batch_size", self.size, 1)

    def elements(self, epoch: Epoch) -> Iterator[Any]:
        elements = self.source.elements(epoch)
        while rows := list(islice(elements, self.size)):
            if len(rows) == self.size or not self.drop_remainder:
                yield _stacked(rows)


@dataclass(eq=False)
class _Repeated(Transformed):
    times: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_infinite |= self.times is None

    def elements(self, epoch: Epoch) -> Iterator[Any]:
        for number in count() if self.times is None else range(self.times):
            empty = True
            for element in self.source.elements((*epoch, number)):
                empty = False
                yield element
            if empty:  # an infinite repeat of it would never yield
                return


@dataclass(eq=False)
class _Shuffled(Transformed):
    buffer_size: int | None
    seed: int | None
    reshuffle: bool
    offset: int = 0
    default_seed: int = field(default_factory=lambda: secrets.randbits(32))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer_size is not None:
            self.buffer_size = whole_number("buffer_size", self.buffer_size, 1)
        elif self.is_infinite:
            raise ValueError("buffer_size=None: must be a number, since the dataset has no end")
        if self.seed is not None:
            self.seed = operator.index(self.seed)  # NumPy's integers have an end
        self.is_shuffled = True

    def with_seed(self, seed: int, offset: int) -> _Shuffled:
        source = self.source.with_seed(seed + 1, offset)
        return replace(self, source=source, default_seed=seed, offset=offset)

    def elements(self, epoch: Epoch) -> Iterator[Any]:
        seed = (self.default_seed if self.seed is None else self.seed) + self.offset
        number = epoch if self.reshuffle else ()
        generator = np.random.default_rng([seed % 2**64, len(number), *number])
        elements = self.source.elements(epoch)
        buffer = list(islice(elements, self.buffer_size))
        for element in elements:
            index = int(generator.integers(len(buffer)))
            yield buffer[index]
            buffer[index] = element
        yield from (buffer[index] for index in generator.permutation(len(buffer)))


@dataclass(eq=False)
class _WithOptions(Transformed):
    given_options: Any

    def options(self) -> Any:
        return self.given_options

    def elements(self, epoch: Epoch) -> Iterator[Any]:
        return self.source.elements(epoch)


def _stacked(rows: list[Any]) -> Any:
    """Elements of one structure, stacked along a new axis 0."""
    if isinstance(rows[0], int):
        return np.array(rows)
    columns = columns_of(rows, "elements")
    stacks = [np.stack([as_array(leaf, "an element") for leaf in column]) for column in columns]
    return nest.pack_like(rows[0], stacks)


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


@dataclass(eq=False)
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
        if isinstance(files, str | bytes | PathLike):
            raise TypeError(f"files={files!r} is one path: must be a list of paths")
        if not callable(read):
            raise TypeError(f"read={read!r}: must be a function of a path")
        self.files: Sequence[str | PathLike[str]] = tuple(files)
        """In reading order."""
        self._read = read

    def elements(self, epoch: Epoch) -> Iterator[Any]:
        """The elements of all files."""
        for file in self.files:
            yield from self._read(file)

    def auto_shard(self, num_shards: int, index: int) -> FileDataset:
        """The dataset of the files index, index + num_shards, … only."""
        return FileDataset(self.files[index::num_shards], self._read)
