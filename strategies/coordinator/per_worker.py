"""Datasets of which every worker has its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from strategies.coordinator.packing import Packed


class PerWorkerValue:
    """Base of what stands for a value that each worker has of its own.

    As `tf.distribute.coordinator.PerWorkerValue`; for `isinstance`. Programs don't make one
    themselves: TypeError.
    """

    def __init__(self, *values: Any) -> None:
        raise TypeError("a PerWorkerValue is made by ClusterCoordinator.create_per_worker_dataset")


class PerWorkerDataset(PerWorkerValue):
    """A dataset on each worker, made there when it is first needed.

    Made by `ClusterCoordinator.create_per_worker_dataset`. `iter` gives what stands for an iterator
    on each worker; it is given to `schedule` as an argument.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._iterators = itertools.count()

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._number, next(self._iterators))


class PerWorkerIterator(PerWorkerValue):
    """Stands for an iterator on each worker: a scheduled function gets that of its worker.

    There, after the dataset's end, `next` raises StopIteration as usual; where that leaves the
    function, it is an `OutOfRangeError`.
    """

    def __init__(self, dataset: int, number: int) -> None:
        self.dataset, self.number = dataset, number

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise TypeError(
            "a per-worker iterator has its batches on the workers: give it to `schedule` as an"
            " argument, and call `next` in the function"
        )


class WorkerDatasets:
    """One worker's datasets and iterators, by their numbers."""

    def __init__(self, unpack: Callable[[Packed], Any]) -> None:
        self._unpack = unpack
        self._packed: dict[int, Packed] = {}
        self._made: dict[int, Any] = {}
        self._iterators: dict[tuple[int, int], Iterator[Any]] = {}

    def add(self, dataset: int, packed: Packed) -> None:
        """Keep what makes a dataset."""
        self._packed[dataset] = packed

    def iterator(self, dataset: int, number: int) -> Iterator[Any]:
        """The iterator, begun where it is not; made here with the dataset, if need be."""
        key = dataset, number
        if key not in self._iterators:
            self._iterators[key] = iter(self._dataset(dataset))
        return self._iterators[key]

    def _dataset(self, number: int) -> Any:
        if number not in self._made:
            given = self._unpack(self._packed[number])
            self._made[number] = given() if callable(given) else given
            del self._packed[number]
        return self._made[number]
