"""Random orders that are the same on all ranks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

import keras
import numpy as np

from collectives import Communicator


def common_seed(communicator: Communicator) -> int:
    """The chief's next random number. Collective.

    `keras.utils.set_random_seed` determines it.
    """
    seed: int = communicator.broadcast_object(int(np.random.randint(1 << 31)))
    return seed


class OrderedPyDataset(keras.utils.PyDataset):
    """The batches of a PyDataset in an order that is the same on all ranks.

    The dataset's workers, threads, read ahead. Those of Keras keep what they have read when an
    iteration ends and begin again at the first batch: batches would come twice, others on each
    rank.
    """

    def __init__(self, dataset: Any, seed: int | None) -> None:
        """`seed` determines the order, a new one whenever the first batch is read; None: its own.

        `max_queue_size` batches are read ahead, as many as there are workers where that is 0.
        """
        super().__init__()
        self._dataset = dataset
        self._order: np.ndarray[Any, Any] | None = None
        self._generator = None if seed is None else np.random.default_rng(seed)
        self._readers = Readers(dataset.workers) if has_workers(dataset) else None
        self._ahead: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None if they have no end."""
        number: int | None = self._dataset.num_batches
        return number

    def __getitem__(self, index: int) -> Any:
        """A batch."""
        with self._lock:
            if index not in self._ahead:
                self._drop()
            if self._generator is not None and (index == 0 or self._order is None):
                self._order = self._generator.permutation(self._dataset.num_batches)
            if self._readers is None:
                return self._dataset[self._place(index)]
            last = index + (self._dataset.max_queue_size or self._dataset.workers)
            if (count := self.num_batches) is not None:
                last = max(index, min(last, count - 1))
            for each in range(index, last + 1):
                if each not in self._ahead:
                    # Without a reference to this, which ends the readers when it is collected.
                    read = self._dataset.__getitem__
                    self._ahead[each] = self._readers.submit(read, self._place(each))
            batch = self._ahead.pop(index)
        return batch.result()

    def on_epoch_begin(self) -> None:
        """Notify the dataset, of which nothing is read meanwhile."""
        with self._lock:
            self._drop()
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notify the dataset, of which nothing is read meanwhile."""
        with self._lock:
            self._drop()
        self._dataset.on_epoch_end()

    def _place(self, index: int) -> int:
        return index if self._order is None else int(self._order[index])

    def _drop(self) -> None:
        """Forget what was read ahead, since the dataset may give other batches from now on."""
        running = [each for each in self._ahead.values() if not each.cancel()]
        self._ahead.clear()
        wait(running)


class Readers:
    """Threads that call functions.

    They are daemons: a program's exit waits for those of an executor.
    """

    def __init__(self, count: int) -> None:
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=_call_all, args=(self._tasks,), daemon=True).start()
        weakref.finalize(self, _end, self._tasks, count)

    def submit(self, function: Callable[[int], Any], index: int) -> Future[Any]:
        """Have a thread call `function(index)`."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, index))
        return future


def _call_all(tasks: SimpleQueue[Any]) -> None:
    while (task := tasks.get()) is not None:
        future, function, index = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(index))
            except BaseException as error:  # raised where the result is waited for
                future.set_exception(error)
        del task, future, function


def _end(tasks: SimpleQueue[Any], count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def has_workers(dataset: Any) -> bool:
    """Whether Keras would read a PyDataset ahead."""
    return dataset.workers > 1 or (dataset.workers > 0 and bool(dataset.use_multiprocessing))
