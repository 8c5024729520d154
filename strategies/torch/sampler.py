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

    It can be named in a `Checkpoint`, which stores the epoch and the position in it; the next
    iteration after `restore` continues there, with any number of ranks. The position counts what
    the DataLoader has taken: one with worker processes takes batches ahead, so that `set_epoch` is
    to be called with the position of the program's own count.
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
        """How many of this rank's samples the epoch has used."""

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Iterate over this epoch next, without this rank's first `position` samples."""
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        """The number of this rank's samples in a whole epoch."""
        whole, more = divmod(len(self._dataset), self._size)
        return whole + bool(more and self._repeats)

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank's samples, from `position` on.

        At the end of an epoch the position is 0 again; `set_epoch` begins another one.
        """
        order = self._order()
        while self.position < len(self):
            index = order[(self.position * self._size + self._rank) % len(order)]
            self.position += 1
            yield int(index)
        self.position = 0

    def _order(self) -> Any:
        if not self._shuffle:
            return torch.arange(len(self._dataset))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        return torch.randperm(len(self._dataset), generator=generator)

    def saved_tensors(self) -> Mapping[str, Array]:
        """The epoch, and the position as a number of samples of all ranks, for `Checkpoint`."""
        return {"epoch": np.array(self.epoch), "position": np.array(self.position * self._size)}

    def restore_tensors(self, tensors: Mapping[str, Array]) -> None:
        """Continue there. Of a step that other ranks made, samples may be used twice."""
        self.set_epoch(int(tensors["epoch"]), int(tensors["position"]) // self._size)
