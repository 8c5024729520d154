"""What stands for values on the workers: results to come, and per-worker datasets."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from strategies.core import nest, values
from strategies.core.values import Array


def _array_of(leaf: Any) -> Any:
    found, tensorflow = values.content(leaf), sys.modules.get("tensorflow")
    is_tensor = tensorflow is not None and tensorflow.is_tensor(found)
    # A sparse tensor has no array.
    return found.numpy() if is_tensor and hasattr(found, "numpy") else found


class RemoteValue:
    """The result of a scheduled function, once there is one.

    As `tf.distribute.coordinator.RemoteValue`; made by `ClusterCoordinator.schedule`.
    """

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def get(self) -> Any:
        """What the function returned; waits for it.

        Raises what the function raised, CancelledError where it was not run, and RankFailedError
        where no worker is left to run it.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    def fetch(self) -> Any:
        """As `get`, with the variables and TensorFlow's tensors in a nest as arrays."""
        return nest.map_leaves(_array_of, self.get())

    def settle(self, value: Any) -> None:
        """The function has returned. For the coordinator."""
        self._value = value
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        """The function will not return. For the coordinator."""
        self._error = error
        self._settled.set()

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            "a RemoteValue can't be given to a scheduled function: fetch it first, and give it the"
            " value"
        )

    def __repr__(self) -> str:
        failure = "" if self._error is None else f"failed with {type(self._error).__name__}"
        return f"<RemoteValue {failure or ('ready' if self._settled.is_set() else 'not ready')}>"


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

    def __init__(self, unpack: Callable[[list[Array]], Any]) -> None:
        self._unpack = unpack
        self._packed: dict[int, list[Array]] = {}
        self._made: dict[int, Any] = {}
        self._iterators: dict[tuple[int, int], Iterator[Any]] = {}

    def add(self, dataset: int, packed: list[Array]) -> None:
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
