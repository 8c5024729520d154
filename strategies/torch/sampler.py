"""ReplicaSampler: which samples of a dataset this replica gets, for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal

import numpy as np
import torch

from collectives import Communicator
from strategies.core.same_error import refuse_differences
from strategies.core.values import Array


class ReplicaSampler(torch.utils.data.Sampler[int]):  # type: ignore[misc]
    """Every rank gets equally many samples, in an order that the seed and the epoch determine.

    All ranks' DataLoaders of equal batch size then have the same number of batches of the same
    lengths. Where the ranks don't divide the dataset, the first samples of the epoch's order are
    used again (remainder="repeat", as torch's DistributedSampler does), or its last ones are left
    out ("drop").

    It can be named in a `Checkpoint`, which stores the epoch and the position in it; iterations
    after `restore` continue there, with any number of ranks. After an iteration to the end, the
    next epoch is stored, if the program sets epochs. The position is that of the iteration which
    began last. It counts what the DataLoader has taken: one with worker processes takes batches
    ahead, so that `set_epoch` is to be called with the position of the program's own count.
    """

    def __init__(
        self,
        communicator: Communicator,
        dataset: Sized,
        *,
        shuffle: bool,
        seed: int,
        remainder: Literal["repeat", "drop"],
    ) -> None:
        """Collective. Raises ValueError on every rank where lengths or arguments differ."""
        given = f"{len(dataset)} samples, {shuffle=}, {seed=}, {remainder=}"
        refuse_differences(communicator, "sampler: the ranks' arguments differ", given)
        if remainder not in ("repeat", "drop"):
            raise ValueError(f"remainder={remainder!r}: must be 'repeat' or 'drop'")
        self._rank, self._size = communicator.rank, communicator.size
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self._repeats = remainder == "repeat"
        self.epoch = 0
        """The epoch of the next iteration."""
        self.position = 0
        """How many of this rank's samples the last iteration has used, of the epoch."""
        self._start = 0
        self._last: object = None
        self._ended = False
        """Whether the last iteration has ended."""
        self._counts_epochs = False
        """Whether the program does, by `set_epoch`: else all have the same order."""

    def set_epoch(self, epoch: int, position: int | None = None) -> None:
        """Iterate over this epoch next, without this rank's first `position` samples.

        None: without those that a restored checkpoint has used of this epoch.
        """
        if position is None:
            position = self._start if epoch == self.epoch else 0
        self.epoch, self._counts_epochs = epoch, True
        self._go_on_at(position)

    def __len__(self) -> int:
        """The number of this rank's samples in a whole epoch."""
        whole, more = divmod(len(self._dataset), self._size)
        return whole + bool(more and self._repeats)

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank's samples, from the restored position on, if there is one.

        Each iteration counts for itself: one that is left early changes no other.
        """
        self._last = this = object()
        order, position = self._order(), self._start
        self.position, self._ended = position, False
        while position < len(self):
            index = order[(position * self._size + self._rank) % len(order)]
            position += 1
            if self._last is this:
                self.position = position
            yield int(index)
        if self._last is this:
            self._start, self._ended = 0, True

    def _order(self) -> Any:
        if not self._shuffle:
            return torch.arange(len(self._dataset))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        return torch.randperm(len(self._dataset), generator=generator)

    def saved_tensors(self) -> Mapping[str, Array]:
        """The epoch, and the position as a number of samples of all ranks, for `Checkpoint`."""
        epoch, position = self.epoch, self.position
        if self._counts_epochs and position >= len(self):
            epoch, position = epoch + 1, 0
        elif self._ended:
            position = 0
        return {"epoch": np.array(epoch), "position": np.array(position * self._size)}

    def restore_tensors(self, tensors: Mapping[str, Array]) -> None:
        """Continue there. Of a step that other ranks made, samples may be used twice."""
        self.epoch = int(tensors["epoch"])
        self._counts_epochs = self.epoch > 0
        self._go_on_at(int(tensors["position"]) // self._size)

    def _go_on_at(self, position: int) -> None:
        """Begin there; iterations that have begun count no more."""
        self._start = self.position = position
        self._last, self._ended = None, False
