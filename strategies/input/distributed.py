"""Distributed iteration: at every step all ranks agree whether there is another batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator
from collectives.scope import named_scope
from strategies.input.element_spec import BatchFormat, FirstBatch, agree_on_format, describe
from strategies.input.failures import raise_apart, raise_together

log = logging.getLogger("strategies")

# A rank's state at a step. The maximum over the ranks decides.
_ENDED, _BATCH, _FAILED = range(3)

_END = object()

# The maximum over the ranks is larger than every number agreed on before.
_numbers = count()

# In place of the digest of a rank that has none, below all of them and their negatives.
_NO_DIGEST = -(1 << 62)
_DIGEST_DIGITS = 15


class _Read(NamedTuple):
    """The result of reading this rank's source at a step."""

    state: int
    batch: Any = None
    first: FirstBatch | None = None
    error: Exception | None = None
    digest: int | None = None
    """Of the global batch, if it is the first one of the iteration and the ranks divide it."""


class GlobalDigest(NamedTuple):
    """Where ranks divide the batches of a dataset that each of them reads."""

    first: Callable[[], str] = str
    """A digest of the last iteration's first global batch, in hexadecimal digits."""

    warning: str = ""
    """What is logged where the ranks' digests differ or, if they end alike, their numbers."""

    ends_alike: bool = False
    """Whether every rank has a part of each batch, so that all end at the same step."""


class NextBatch:
    """A batch or none, as the `tf.experimental.Optional` of a distributed iterator."""

    def __init__(self, *batch: Any) -> None:
        self._batch = batch

    def has_value(self) -> bool:
        """Whether there is a batch: the same on all ranks."""
        return bool(self._batch)

    def get_value(self) -> Any:
        """The batch. ValueError where there is none."""
        if not self._batch:
            raise ValueError("no rank has another batch: call has_value() first")
        return self._batch[0]


class DistributedDataset:
    """This rank's batches, iterated in step on all ranks, as `tf.distribute.DistributedDataset`.

    Each step is collective: iterate on every rank, to the end or for the same number of steps.
    Where other ranks have data and this one has none, it gets a batch without examples. Where a
    rank's source raises an exception, that rank raises it and the others a DatasetError, at the
    same step. Where ranks are at different steps, since one has left an iteration that others
    continue, all raise the same DatasetError.
    """

    def __init__(
        self,
        communicator: Communicator,
        begin: Callable[[], Generator[Any, None, None]],
        global_digest: GlobalDigest | None = None,
    ) -> None:
        """`begin` starts an iteration over this rank's batches."""
        self.communicator, self.global_digest = communicator, global_digest or GlobalDigest()
        self.number = int(communicator.all_reduce(np.array(next(_numbers)), "max"))
        self.begin = begin
        self.format: BatchFormat | None = None
        self.warned = False
        """Of global batches that differ between the ranks."""
        self._begun: DistributedIterator | None = None

    def __iter__(self) -> DistributedIterator:
        begun, self._begun = self._begun, None
        return begun or DistributedIterator(self)

    @property
    def element_spec(self) -> Any:
        """A nest of TensorSpec, from the ranks' first batches.

        Before the first step it is collective, and reads the first batch of the next iteration.
        Raises the same ValueError on every rank where no rank has a batch or the first ones differ.
        """
        if self.format is None:
            begun = DistributedIterator(self)
            begun.prefetch()
            if self.format is None:
                raise ValueError("element_spec is not known: no rank's dataset has a batch")
            self._begun = begun
        return self.format.element_spec

    def warn_of_differences(self) -> None:
        """Log on rank 0, once, that the ranks take parts of different global batches."""
        if self.communicator.rank == 0 and not self.warned:
            log.warning("%s", self.global_digest.warning)
        self.warned = True


class DistributedIterator(Iterator[Any]):
    """One iteration of a DistributedDataset, as `tf.distribute.DistributedIterator`."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._batches = dataset.begin()
        self._prefetched: list[Any] = []
        self._read: _Read | None = None
        self._ended = False
        # The dataset's number, after the first step the iteration's; the number of steps done.
        self._position = (dataset.number, 0)

    @property
    def element_spec(self) -> Any:
        """The dataset's."""
        if self._dataset.format is None:
            self.prefetch()
        return self._dataset.element_spec

    def __next__(self) -> Any:
        return self._prefetched.pop() if self._prefetched else self._step()

    def get_next(self) -> Any:
        """The next batch; StopIteration where no rank has one."""
        return next(self)

    def get_next_as_optional(self) -> NextBatch:
        """The next batch, or none at the end, which is the same step on all ranks. Collective."""
        return NextBatch(*[batch for batch in (next(self, _END),) if batch is not _END])

    def prefetch(self) -> None:
        """Do the next step and store its batch. Collective."""
        if not self._prefetched:
            self._prefetched = [batch for batch in (next(self, None),) if batch is not None]

    def _step(self) -> Any:
        if self._ended:
            raise StopIteration
        # Stored until the ranks have agreed: after a deadline the same step is repeated.
        self._read = self._read or self._read_one()
        communicator = self._dataset.communicator
        # Four elements equal the maximum on every rank only where all positions are equal, and a
        # digest that of all ranks only where its negative does.
        iteration, step = self._position
        position = [iteration, step, -iteration, -step]
        digest = self._read.digest
        if self._read.state != _FAILED and self._dataset.global_digest.ends_alike:
            digest = self._read.state if digest is None else digest
        digests = [_NO_DIGEST] * 2 if digest is None else [digest, -digest]
        vote = np.array([self._read.state, next(_numbers), *position, *digests], np.int64)
        with named_scope(communicator, "the next batch of a distributed dataset"):
            state, number, *found, most, least = communicator.all_reduce(vote, "max").tolist()
        read, self._read = self._read, None
        if found != position:
            self._end()
            raise_apart(communicator, self._position)
        if most + least > 0:
            self._dataset.warn_of_differences()
        self._position = (iteration if step else number, step + 1)
        if state == _BATCH:
            return self._batch_of(read)
        self._end()
        if state == _FAILED:
            raise_together(communicator, read.error)
        raise StopIteration

    def _read_one(self) -> _Read:
        try:
            for batch in self._batches:
                digest = "" if self._position[1] else self._dataset.global_digest.first()
                number = int(digest[:_DIGEST_DIGITS], 16) if digest else None
                first = describe(batch) if self._dataset.format is None else None
                return _Read(_BATCH, batch, first, digest=number)
            return _Read(_ENDED)
        except Exception as error:
            return _Read(_FAILED, error=error)
        except BaseException:
            # The interrupt has closed the source; the next step must not take that for the end.
            interrupted = RuntimeError("reading the dataset was interrupted at this step")
            self._read = _Read(_FAILED, error=interrupted)
            raise

    def _batch_of(self, read: _Read) -> Any:
        if self._dataset.format is None:
            try:
                self._dataset.format = agree_on_format(self._dataset.communicator, read.first)
            except ValueError:
                self._end()
                raise
        return read.batch if read.state == _BATCH else self._dataset.format.empty

    def _end(self) -> None:
        self._ended = True
        self._batches.close()
