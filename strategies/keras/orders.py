"""Random orders that are the same on all ranks."""

from __future__ import annotations

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


class ShuffledPyDataset(keras.utils.PyDataset):
    """The batches of a PyDataset in an order that the seed determines."""

    def __init__(self, dataset: Any, seed: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._generator = dataset, np.random.default_rng(seed)
        self._order = self._generator.permutation(dataset.num_batches)

    @property
    def num_batches(self) -> int:
        """The number of batches."""
        number: int = self._dataset.num_batches
        return number

    def __getitem__(self, index: int) -> Any:
        """A batch."""
        return self._dataset[int(self._order[index])]

    def on_epoch_begin(self) -> None:
        """Notify the dataset."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notify the dataset, and draw the next epoch's order."""
        self._dataset.on_epoch_end()
        self._order = self._generator.permutation(self._dataset.num_batches)
