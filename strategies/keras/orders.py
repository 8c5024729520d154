"""Random orders that are the same on all ranks."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
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
        """`seed` determines the order, a new one in each epoch; None: the dataset's own order."""
        super().__init__()
        self._dataset = dataset
        self._generator = None if seed is None else np.random.default_rng(seed)
        self._threads = ThreadPoolExecutor(dataset.workers) if has_workers(dataset) else None
        self._ahead: dict[int, Future[Any]] = {}
        self._lock = Lock()
        self._begin()

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None if they have no end."""
        number: int | None = self._dataset.num_batches
        return number

    def __getitem__(self, index: int) -> Any:
        """A batch."""
        if self._threads is None:
            return self._read(index)
        with self._lock:
            if index not in self._ahead:
                self._drop()
            end = index + max(self._dataset.max_queue_size, 1)
            count = self.num_batches
            for each in range(index, end if count is None else min(end, count)):
                if each not in self._ahead:
                    self._ahead[each] = self._threads.submit(self._read, each)
            batch = self._ahead.pop(index)
        return batch.result()

    def on_epoch_begin(self) -> None:
        """Notify the dataset."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notify the dataset, and draw the next epoch's order."""
        self._dataset.on_epoch_end()
        with self._lock:
            self._drop()
            self._begin()

    def _begin(self) -> None:
        if self._generator is not None:
            self._order = self._generator.permutation(self._dataset.num_batches)

    def _read(self, index: int) -> Any:
        return self._dataset[index if self._generator is None else int(self._order[index])]

    def _drop(self) -> None:
        """Forget what was read ahead: the dataset may give other batches now."""
        for batch in self._ahead.values():
            batch.cancel()
        self._ahead.clear()


def has_workers(dataset: Any) -> bool:
    """Whether Keras would read a PyDataset ahead."""
    return dataset.workers > 1 or (dataset.workers > 0 and bool(dataset.use_multiprocessing))
