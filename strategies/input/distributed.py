"""Iterating together: at every step the ranks agree on whether there is another batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.scope import named_scope
from strategies.input.element_spec import First, Form, agree_on_form, described
from strategies.input.failures import raise_apart, raise_together

# What a rank says at a step; the greatest one is what happens.
_ENDED, _HAS, _FAILED = range(3)

_END = object()

# The greatest of what the ranks draw is larger than any that they agreed on before.
_numbers = count()


class _Read(NamedTuple):
    """What a rank's source gave at a step."""

    state: int
    batch: Any = None
    first: First | None = None
    error: Exception | None = None


def _vote(state: int, place: tuple[int, int]) -> NDArray[np.int64]:
    """Of which the ranks' greatest equals each rank's own in its last four where places agree."""
    number, step = place
    return np.array([state, next(_numbers), number, step, -number, -step], np.int64)


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
            raise ValueError("no rank has another batch: ask has_value() first")
        return self._batch[0]


class DistributedDataset:
    """This rank's batches, iterated by all ranks together, as `tf.distribute.DistributedDataset`.

    Each step is collective: iterate on every rank, to the end or as far as all the others do.
    Where the others still have data and this rank has none, it gets a batch without examples. A
    rank whose source raises an exception raises it, and the others a DatasetError, at that step.
    Ranks that are at different steps, since one left an iteration that others go on with, all raise
    the same DatasetError.
    """

    def __init__(
        self,
        communicator: Communicator,
        begin: Callable[[], Generator[Any, None, None]],
        whole: Callable[[], str] = str,
    ) -> None:
        """`whole` gives a digest of the first global batch, where batches are parts of such."""
        self.communicator, self.whole = communicator, whole
        self.number = int(communicator.all_reduce(np.array(next(_numbers)), "max"))
        self.begin = begin
        self.form: Form | None = None
        self._begun: DistributedIterator | None = None

    def __iter__(self) -> DistributedIterator:
        begun, self._begun = self._begun, None
        return begun or DistributedIterator(self)

    @property
    def element_spec(self) -> Any:
        """A nest of TensorSpec, from the ranks' first batches.

        Before the first step it is collective, and reads the first batch of the next iteration.
        Raises ValueError, on every rank alike, where no rank has a batch or the first ones differ.
        """
        if self.form is None:
            begun = DistributedIterator(self)
            begun.look_ahead()
            if self.form is None:
                raise ValueError("element_spec is not known: no rank's dataset has a batch")
            self._begun = begun
        return self.form.element_spec


class DistributedIterator(Iterator[Any]):
    """One iteration of a DistributedDataset, as `tf.distribute.DistributedIterator`."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._batches = dataset.begin()
        self._ahead: list[Any] = []
        self._read: _Read | None = None
        self._over = False
        # The dataset's number, after the first step the iteration's; how many steps were made.
        self._place = (dataset.number, 0)

    @property
    def element_spec(self) -> Any:
        """As the dataset's."""
        if self._dataset.form is None:
            self.look_ahead()
        return self._dataset.element_spec

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else self._step()

    def get_next(self) -> Any:
        """The next batch; StopIteration where no rank has one."""
        return next(self)

    def get_next_as_optional(self) -> NextBatch:
        """The next batch, or the end, which comes on all ranks at the same step. Collective."""
        return NextBatch(*[batch for batch in (next(self, _END),) if batch is not _END])

    def look_ahead(self) -> None:
        """Make the next step already, and keep its batch. Collective."""
        if not self._ahead:
            self._ahead = [batch for batch in (next(self, None),) if batch is not None]

    def _step(self) -> Any:
        if self._over:
            raise StopIteration
        # Kept until the ranks have agreed: where that fails by a deadline, the step comes again.
        self._read = self._read or self._read_one()
        communicator = self._dataset.communicator
        vote = _vote(self._read.state, self._place)
        with named_scope(communicator, "the next batch of a distributed dataset"):
            agreed, number, *ends = communicator.all_reduce(vote, "max").tolist()
        read, self._read = self._read, None
        if ends != vote[2:].tolist():
            self._end()
            raise_apart(communicator, self._place)
        step = self._place[1]
        self._place = (self._place[0] if step else number, step + 1)
        if agreed == _HAS:
            return self._delivered(read)
        self._end()
        if agreed == _FAILED:
            raise_together(communicator, read.error)
        raise StopIteration

    def _read_one(self) -> _Read:
        try:
            for batch in self._batches:
                known = self._dataset.form is not None
                return _Read(
                    _HAS, batch, None if known else described(batch, self._dataset.whole())
                )
            return _Read(_ENDED)
        except Exception as error:
            return _Read(_FAILED, error=error)
        except BaseException:
            # What was read from has ended thereby; the next step must not take it for the end.
            interrupted = RuntimeError("reading the dataset was interrupted at this step")
            self._read = _Read(_FAILED, error=interrupted)
            raise

    def _delivered(self, read: _Read) -> Any:
        if self._dataset.form is None:
            self._dataset.form = self._agreed_form(read)
        return read.batch if read.state == _HAS else self._dataset.form.empty

    def _agreed_form(self, read: _Read) -> Form:
        try:
            return agree_on_form(self._dataset.communicator, read.first)
        except ValueError:
            self._end()
            raise

    def _end(self) -> None:
        self._over = True
        self._batches.close()
