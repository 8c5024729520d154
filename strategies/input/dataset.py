"""Dataset: a re-iterable of elements with `tf.data`'s batch, shuffle, repeat and with_options.

For scripts that write `make_numpy_dataset(x).shuffle(1000).batch(64)`, and for datasets of files.
The order of an iteration depends on the seed and the iteration's number only. Ranks that iterate
equally often get the same order, however far they read ahead.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, TypeVar

import numpy as np

from strategies.core import nest
from strategies.core.values import as_array
from strategies.input.options import Options

Epoch = tuple[int, ...]  # the number of the iteration, then those of nested repeats
Self = TypeVar("Self", bound="Dataset")
Derived = TypeVar("Derived", bound="Transformed")


class Dataset(ABC):
    """Elements that can be iterated any number of times, as `tf.data.Dataset`."""

    def __iter__(self) -> Iterator[Any]:
        iterations = self.__dict__.setdefault("_iterations", count())
        return self.elements((next(iterations),))

    @abstractmethod
    def elements(self, epoch: Epoch) -> Iterator[Any]:
        """The elements of one epoch."""

    @property
    def files(self) -> Sequence[Any] | None:
        """The files that the dataset reads; None where it reads none."""
        return None

    @property
    def batch_size(self) -> int | None:
        """The number of examples in a full batch; None where it is unknown."""
        return None

    @property
    def is_shuffled(self) -> bool:
        """Whether a shuffle is part of the dataset, so that a seed has an effect."""
        return False

    @property
    def is_infinite(self) -> bool:
        """Whether the dataset is known to have no end."""
        return False

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
        batch_size isn't positive, and while iterating where shapes differ.
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
        ValueError for a buffer_size that isn't positive, or None for an infinite dataset.
        """
        return self.transform(_Shuffled, buffer_size, seed, reshuffle_each_iteration is not False)

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat the elements `count` times, or infinitely for None or −1."""
        return self.transform(_Repeated, None if count == -1 else count)

    def with_options(self, options: Any) -> Dataset:
        """Set options; an object with the attributes of `tf.data.Options` is accepted."""
        return self.transform(_WithOptions, options)


@dataclass(frozen=True, eq=False)
class Transformed(Dataset):
    """A dataset derived from another, whose properties it inherits."""

    source: Dataset

    @property
    def files(self) -> Sequence[Any] | None:
        """The source's."""
        return self.source.files

    @property
    def batch_size(self) -> int | None:
        """The source's."""
        return self.source.batch_size

    @property
    def is_shuffled(self) -> bool:
        """The source's."""
        return self.source.is_shuffled

    @property
    def is_infinite(self) -> bool:
        """The source's."""
        return self.source.is_infinite

    def options(self) -> Any:
        """The source's."""
        return self.source.options()

    def auto_shard(self: Derived, num_shards: int, index: int) -> Derived:
        """Apply to the source."""
        return replace(self, source=self.source.auto_shard(num_shards, index))

    def with_seed(self: Derived, seed: int, offset: int) -> Derived:
        """Apply to the source."""
        return replace(self, source=self.source.with_seed(seed + 1, offset))


@dataclass(frozen=True, eq=False)
class _Batched(Transformed):
    size: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"batch_size={self.size!r}: must be positive")

    @property
    def batch_size(self) -> int:
        return self.size

    def elements(self, epoch: Epoch) -> Iterator[Any]:
        elements = self.source.elements(epoch)
        while rows := list(islice(elements, self.size)):
            if len(rows) == self.size or not self.drop_remainder:
                yield _stacked(rows)


@dataclass(frozen=True, eq=False)
class _Repeated(Transformed):
    times: int | None

    @property
    def is_infinite(self) -> bool:
        return self.times is None or self.source.is_infinite

    def elements(self, epoch: Epoch) -> Iterator[Any]:
        for number in count() if self.times is None else range(self.times):
            empty = True
            for element in self.source.elements((*epoch, number)):
                empty = False
                yield element
            if empty:  # an infinite repeat of it would never yield
                return


@dataclass(frozen=True, eq=False)
class _Shuffled(Transformed):
    buffer_size: int | None
    seed: int | None
    reshuffle: bool
    offset: int = 0
    default_seed: int = field(default_factory=lambda: secrets.randbits(32))

    def __post_init__(self) -> None:
        size = self.buffer_size
        if size is not None and size < 1:
            raise ValueError(f"buffer_size={size!r}: must be positive, or None for all elements")
        if size is None and self.source.is_infinite:
            raise ValueError("buffer_size=None: must be a number, since the dataset has no end")

    @property
    def is_shuffled(self) -> bool:
        return True

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


@dataclass(frozen=True, eq=False)
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
    columns = zip(*map(nest.leaves, rows), strict=True)
    stacks = [np.stack([as_array(leaf, "an element") for leaf in column]) for column in columns]
    return nest.pack_like(rows[0], stacks)
