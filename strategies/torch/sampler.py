"""ReplicaSampler: which samples of a dataset this replica gets, for torch's DataLoader."""

from __future__ import annotations

import logging
import operator
import sys
import threading
from collections.abc import Iterator, Mapping, Sized
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch

from collectives import Communicator
from strategies.core.same_error import PropagatedErrors, refuse_differences
from strategies.core.values import Array, whole_number
from strategies.input.distribution import ReaderThread

log = logging.getLogger("strategies")

_FRAMES = 12


class ReplicaSampler(torch.utils.data.Sampler[int]):
    """Every rank gets equally many samples, in an order that the seed and the epoch determine.

    All ranks' DataLoaders of equal batch size then have the same number of batches of the same
    lengths. Where the ranks don't divide the dataset, the first samples of the epoch's order are
    used again (remainder="repeat", as torch's DistributedSampler does), or its last ones are left
    out ("drop").

    It can be named in a `Checkpoint`, which stores the epoch and the position in it; iterations
    after `restore` continue there, with any number of ranks. After an iteration to the end, the
    next epoch is stored, if the program sets epochs. The position is that of the iteration which
    began last: what a DataLoader has delivered, also of batches that its worker processes read
    ahead; a batch whose reading has failed counts. A warning is logged where it is not known: with
    worker processes and `in_order=False`, a batch sampler or loader of another class than torch's,
    or a sampler around this one; and before the end of an iteration that a thread of the strategy
    reads ahead (`InputOptions.experimental_per_replica_buffer_size`).
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
        with PropagatedErrors(communicator, "sampler"):
            given = f"{len(dataset)} samples, {shuffle=}, {seed=}, {remainder=}"
            seed = operator.index(seed)
        refuse_differences(communicator, "sampler: the ranks' arguments differ", given)
        if remainder not in ("repeat", "drop"):
            raise ValueError(f"remainder={remainder!r}: must be 'repeat' or 'drop'")
        self._rank, self._size = communicator.rank, communicator.size
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self._repeats = remainder == "repeat"
        self.epoch = 0
        """The epoch of the next iteration."""
        self._start = 0
        self._last: _Iteration | None = None
        """The iteration that began last, unless the program has chosen a position since."""
        self._counts_epochs = False
        """Whether the program does, by `set_epoch`: else all have the same order."""

    def set_epoch(self, epoch: int, position: int | None = None) -> None:
        """Iterate over this epoch next, without this rank's first `position` samples.

        None: without those that a restored checkpoint has used of this epoch. TypeError for numbers
        that are no integers, ValueError below 0.
        """
        if position is None:
            position = self._start if epoch == self.epoch else 0
        position = whole_number("position", position, 0)
        self.epoch, self._counts_epochs = whole_number("epoch", epoch, 0), True
        self._go_on_at(position)

    def __len__(self) -> int:
        """The number of this rank's samples in a whole epoch."""
        whole, more = divmod(len(self._dataset), self._size)
        return whole + bool(more and self._repeats)

    @property
    def position(self) -> int:
        """How many of this rank's samples the last iteration has used, of the epoch."""
        return self._start if self._last is None else self._last.position

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank's samples, from the restored position on, if there is one.

        Each iteration counts for itself: one that is left early changes no other.
        """
        self._last = this = _Iteration(self, self._start, _loader_above(sys._getframe()))
        order = self._order()
        while this.taken < len(self):
            index = order[(this.taken * self._size + self._rank) % len(order)]
            this.taken += 1
            yield int(index)
        this.ended = True
        if self._last is this:
            self._start = 0

    def _order(self) -> Any:
        if not self._shuffle:
            return torch.arange(len(self._dataset))
        number = (self._seed * 1_000_003 + self.epoch) % (1 << 63)
        generator = torch.Generator().manual_seed(number)
        return torch.randperm(len(self._dataset), generator=generator)

    def saved_tensors(self) -> Mapping[str, Array]:
        """The epoch, and the position as a number of samples of all ranks, for `Checkpoint`."""
        epoch, position, last = self.epoch, self.position, self._last
        if last is not None and (reason := last.why_unknown):
            log.warning(
                "sampler: the iteration of epoch %d %s, so that what its DataLoader has delivered"
                " is not known: %d samples are saved as used",
                epoch,
                reason,
                position,
            )
        if self._counts_epochs and position >= len(self):
            epoch, position = epoch + 1, 0
        elif last is not None and last.ended and position >= len(self):
            position = 0
        return {"epoch": np.array(epoch), "position": np.array(position * self._size)}

    def restore_tensors(self, tensors: Mapping[str, Array]) -> None:
        """Continue there. Of a step that other ranks made, samples may be used twice."""
        self.epoch = int(tensors["epoch"])
        self._counts_epochs = self.epoch > 0
        self._go_on_at(int(tensors["position"]) // self._size)

    def _go_on_at(self, position: int) -> None:
        """Begin there; iterations that have begun count no more."""
        self._start, self._last = position, None


class _Iteration:
    """One iteration over this rank's samples."""

    def __init__(self, sampler: ReplicaSampler, start: int, loader: Any) -> None:
        """`loader` delivers the samples, if worker processes of a DataLoader read them."""
        self._start = self.taken = start
        self.ended = False
        thread = threading.current_thread()
        self._reader = thread if isinstance(thread, ReaderThread) else None
        # Not the loader itself, whose processes end with it.
        self._waiting: Sized = getattr(loader, "_task_info", ())
        """The batches that were asked for, and not delivered."""
        self._batches = getattr(loader, "_index_sampler", None)
        self._obstacle = "" if loader is None else _obstacle(loader, sampler)

    @property
    def position(self) -> int:
        """How many of this rank's samples were delivered, of the epoch."""
        if not self._waiting or self._obstacle:
            return self.taken
        rows = getattr(self._batches, "batch_size", 1)
        whole, more = divmod(self.taken - self._start, rows)
        short = more > 0 and not getattr(self._batches, "drop_last", False)
        return self._start + (whole + short - len(self._waiting)) * rows

    @property
    def why_unknown(self) -> str:
        """Why it is not known which samples were delivered, of those up to the position; or ""."""
        if self._reader is not None and not self._reader.delivered:
            return "is read ahead"
        return "" if self.ended and not self._waiting else self._obstacle


def _obstacle(loader: Any, sampler: ReplicaSampler) -> str:
    """Why the number of a loader's batches doesn't say which samples it has delivered; or ""."""
    batches = loader._index_sampler
    if type(loader) is not torch.utils.data.dataloader._MultiProcessingDataLoaderIter:
        return f"has a loader of class {type(loader).__name__}"
    if batches is not sampler:
        if getattr(type(batches), "__iter__", None) is not torch.utils.data.BatchSampler.__iter__:
            return f"has a batch sampler of class {type(batches).__name__}"
        if batches.sampler is not sampler:
            return f"has a sampler of class {type(batches.sampler).__name__} around it"
    return "" if getattr(loader, "_in_order", True) else "has a DataLoader with in_order=False"


def _loader_above(frame: FrameType | None) -> Any:
    """What iterates over a DataLoader with worker processes, and now takes the first index."""
    for _ in range(_FRAMES):
        frame = None if frame is None else frame.f_back
        caller = None if frame is None else frame.f_locals.get("self")
        if isinstance(caller, torch.utils.data.dataloader._BaseDataLoaderIter):
            return caller if caller._num_workers else None
    return None
