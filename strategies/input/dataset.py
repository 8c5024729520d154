"""A re-iterable of elements with `tf.data`'s names: batch, shuffle, repeat, with_options.

For scripts that write `make_numpy_dataset(x).shuffle(1000).batch(64)`, and for datasets of files.
The order of every iteration follows from the seed and the iteration's number alone, so that ranks
that iterate as often see the same order, however far they read ahead.
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

Place = tuple[int, ...]  # the numbers of the iteration and of the repeats inside of it
Self = TypeVar("Self", bound="Dataset")
Made = TypeVar("Made", bound="Transformed")


class Dataset(ABC):
    """Elements that can be iterated again and again, as `tf.data.Dataset`."""

    def __iter__(self) -> Iterator[Any]:
        numbers = self.__dict__.setdefault("_numbers", count())
        return self.elements((next(numbers),))

    @abstractmethod
    def elements(self, place: Place) -> Iterator[Any]:
        """The elements of the iteration of this number."""

    @property
    def files(self) -> Sequence[Any] | None:
        """The files that it reads; None where it reads none."""
        return None

    @property
    def batch_size(self) -> int | None:
        """The number of examples in a full batch; None where it isn't known."""
        return None

    @property
    def is_shuffled(self) -> bool:
        """Whether there is a shuffle in it, so that a seed makes a difference."""
        return False

    @property
    def is_endless(self) -> bool:
        """Whether it is known that it has no end."""
        return False

    def options(self) -> Any:
        """What `with_options` was given; the defaults otherwise."""
        return Options()

    def auto_shard(self: Self, num_shards: int, index: int) -> Self:
        """The same over the files index, index + num_shards, … alone."""
        return self

    def with_seed(self: Self, seed: int, offset: int) -> Self:
        """The same with this seed where a shuffle has none, and the offset added to every seed."""
        return self

    def into(self, make: Callable[..., Dataset], *arguments: Any) -> Dataset:
        """`make(self, *arguments)`; where a kind of dataset has a better way, that."""
        return make(self, *arguments)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Elements stacked along a new axis 0, `batch_size` at a time.

        The last batch is shorter or, with drop_remainder, left out. Raises ValueError where
        batch_size isn't positive; while iterating, where shapes differ.
        """
        return self.into(_Batched, batch_size, drop_remainder)

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
    ) -> Dataset:
        """The elements in another order, each drawn at random from a buffer of the next ones.

        buffer_size None holds all of them. Without a seed the order is by chance, but the same
        on all ranks where a distributed dataset cuts each global batch between them. Raises
        ValueError for a buffer_size that isn't positive, or None for a dataset without end.
        """
        return self.into(_Shuffled, buffer_size, seed, reshuffle_each_iteration is not False)

    def repeat(self, count: int | None = None) -> Dataset:
        """The elements over and over: `count` times, without end for None or −1."""
        return self.into(_Repeated, None if count == -1 else count)

    def with_options(self, options: Any) -> Dataset:
        """The same with options; an object like `tf.data.Options` will do."""
        return self.into(_WithOptions, options)


@dataclass(frozen=True, eq=False)
class Transformed(Dataset):
    """A dataset made of another, which it asks for what it doesn't know itself."""

    source: Dataset

    @property
    def files(self) -> Sequence[Any] | None:
        """As the source's."""
        return self.source.files

    @property
    def batch_size(self) -> int | None:
        """As the source's."""
        return self.source.batch_size

    @property
    def is_shuffled(self) -> bool:
        """As the source's."""
        return self.source.is_shuffled

    @property
    def is_endless(self) -> bool:
        """As the source's."""
        return self.source.is_endless

    def options(self) -> Any:
        """As the source's."""
        return self.source.options()

    def auto_shard(self: Made, num_shards: int, index: int) -> Made:
        """The same of the source so changed."""
        return replace(self, source=self.source.auto_shard(num_shards, index))

    def with_seed(self: Made, seed: int, offset: int) -> Made:
        """The same of the source so changed."""
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

    def elements(self, place: Place) -> Iterator[Any]:
        elements = self.source.elements(place)
        while rows := list(islice(elements, self.size)):
            if len(rows) == self.size or not self.drop_remainder:
                yield _stacked(rows)


@dataclass(frozen=True, eq=False)
class _Repeated(Transformed):
    times: int | None

    @property
    def is_endless(self) -> bool:
        return self.times is None or self.source.is_endless

    def elements(self, place: Place) -> Iterator[Any]:
        for number in count() if self.times is None else range(self.times):
            empty = True
            for element in self.source.elements((*place, number)):
                empty = False
                yield element
            if empty:  # and would be for ever
                return


@dataclass(frozen=True, eq=False)
class _Shuffled(Transformed):
    buffer_size: int | None
    seed: int | None
    reshuffle: bool
    offset: int = 0
    seed_by_chance: int = field(default_factory=lambda: secrets.randbits(32))

    def __post_init__(self) -> None:
        size = self.buffer_size
        if size is not None and size < 1:
            raise ValueError(f"buffer_size={size!r}: must be positive, or None for all elements")
        if size is None and self.source.is_endless:
            raise ValueError("buffer_size=None: must be a number, the dataset having no end")

    @property
    def is_shuffled(self) -> bool:
        return True

    def with_seed(self, seed: int, offset: int) -> _Shuffled:
        source = self.source.with_seed(seed + 1, offset)
        return replace(self, source=source, seed_by_chance=seed, offset=offset)

    def elements(self, place: Place) -> Iterator[Any]:
        seed = (self.seed_by_chance if self.seed is None else self.seed) + self.offset
        where = place if self.reshuffle else ()
        chance = np.random.default_rng([seed % 2**64, len(where), *where])
        elements = self.source.elements(place)
        buffer = list(islice(elements, self.buffer_size))
        for element in elements:
            drawn = int(chance.integers(len(buffer)))
            yield buffer[drawn]
            buffer[drawn] = element
        yield from (buffer[drawn] for drawn in chance.permutation(len(buffer)))


@dataclass(frozen=True, eq=False)
class _WithOptions(Transformed):
    given: Any

    def options(self) -> Any:
        return self.given

    def elements(self, place: Place) -> Iterator[Any]:
        return self.source.elements(place)


def _stacked(rows: list[Any]) -> Any:
    """Elements of one structure along a new axis 0."""
    if isinstance(rows[0], int):
        return np.array(rows)
    columns = zip(*map(nest.leaves, rows), strict=True)
    stacks = [np.stack([as_array(leaf, "an element") for leaf in column]) for column in columns]
    return nest.pack_like(rows[0], stacks)
