"""Distribution of a user's dataset: from options and dataset to this rank's batches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from collectives import Communicator
from strategies.input.autoshard import Sharding, agree_on_sharding, checked_options
from strategies.input.batches import arrays_of, contiguous_part, copied, digest_of
from strategies.input.distributed import DistributedDataset, GlobalDigest
from strategies.input.failures import call_together, check_together
from strategies.input.options import AutoShardPolicy, InputContext, InputOptions
from strategies.input.rebatching import rebatched
from strategies.input.sources import (
    InOneOrder,
    RandomOrder,
    batch_size_of,
    check_iterable,
    iterate,
)

# Not an error: each rank may augment the same examples differently.
_DIFFERENT_BATCHES = (
    "each rank takes its part of every global batch (AutoShardPolicy.DATA), but the ranks'"
    " global batches differ. If their order or number differs, examples are lost or repeated:"
    " shuffle with the same seed on every rank, or use sharding='seed_offset', AutoShardPolicy.OFF"
    " or distribute_datasets_from_function, where every rank reads a pipeline of its own"
)


def distribute(
    communicator: Communicator, dataset: Iterable[Any], options: Any = None
) -> DistributedDataset:
    """`Strategy.experimental_distribute_dataset` between the ranks of the communicator."""
    sharding = agree_on_sharding(communicator, dataset, options)
    rank, size = communicator.rank, communicator.size
    shard = call_together(communicator, lambda: _shard(dataset, sharding, rank, size))
    depth = checked_options(options).experimental_per_replica_buffer_size
    ahead = ReadAhead(depth, RandomOrder(dataset))

    def begin() -> Batches:
        return ahead.read(_copies(shard()) if depth else shard())

    if isinstance(shard, _Parts):
        digest = GlobalDigest(lambda: shard.digest, _DIFFERENT_BATCHES, ends_alike=True)
        return DistributedDataset(communicator, begin, digest)
    return DistributedDataset(communicator, begin)


def distribute_from_function(
    communicator: Communicator,
    dataset_fn: Callable[[InputContext], Iterable[Any]],
    options: Any,
) -> DistributedDataset:
    """`Strategy.distribute_datasets_from_function` between the ranks of the communicator."""
    size = communicator.size
    context = InputContext(size, communicator.rank, size)
    checked = check_together(communicator, lambda: _without_sharding(options))
    dataset = call_together(communicator, lambda: dataset_fn(context))
    check_together(communicator, lambda: check_iterable(dataset))
    ahead = ReadAhead(checked.experimental_per_replica_buffer_size, RandomOrder(dataset))
    return DistributedDataset(communicator, lambda: ahead.read(_unchanged(dataset)))


def _without_sharding(options: Any) -> InputOptions:
    checked = checked_options(options)
    if checked.auto_shard_policy is not None or checked.sharding is not None:
        raise ValueError(
            "options request sharding, but distribute_datasets_from_function leaves that to the"
            " function: must have neither auto_shard_policy nor sharding"
        )
    return checked


def _shard(dataset: Any, sharding: Sharding, rank: int, size: int) -> Callable[[], Batches]:
    """A function that begins an iteration over the rank's shard."""
    if isinstance(dataset, DistributedDataset):
        raise TypeError("dataset is a DistributedDataset: must be one that is not distributed yet")
    if sharding.policy is AutoShardPolicy.DATA:
        return _Parts(InOneOrder(dataset, sharding.seed, divided=size > 1), rank, size)
    if sharding.policy is AutoShardPolicy.FILE:
        dataset = dataset.auto_shard(size, rank)
    if sharding.own_seeds:
        dataset = dataset.with_seed(sharding.seed, rank)
    return partial(_rebatched, dataset, rank, size)


# Calls of these give generators: an exception of `iter(dataset)` is raised at the first step.


class _Parts:
    """The rank's part of every batch of a dataset that all ranks read."""

    def __init__(self, dataset: InOneOrder, rank: int, size: int) -> None:
        self._dataset, self._rank, self._size = dataset, rank, size
        self.digest = ""
        """Of the first batch of the iteration that began last."""

    def __call__(self) -> Batches:
        first = True
        for batch in self._dataset:
            part = contiguous_part(batch, self._rank, self._size)
            if first:
                self.digest, first = digest_of(batch), False
            yield part


def _rebatched(dataset: Any, rank: int, size: int) -> Batches:
    yield from rebatched(iterate(dataset), rank, size, batch_size_of(dataset))


def _copies(batches: Batches) -> Batches:
    with closing(batches):
        yield from map(copied, batches)


def _unchanged(dataset: Any) -> Batches:
    for batch in iterate(dataset):
        arrays_of(batch)
        yield batch


THREAD_NAME = "strategies-read-ahead"
Batches = Generator[Any, None, None]


class _End(NamedTuple):
    error: BaseException | None


class ReaderThread(threading.Thread):
    """What reads batches ahead."""

    def __init__(self, target: Callable[[], None]) -> None:
        super().__init__(target=target, name=THREAD_NAME, daemon=True)
        self.stopped = threading.Event()
        """Set where the iteration was left; the thread ends after the batch that it is reading."""
        self.delivered = False
        """Whether the program has got all of its batches."""


class ReadAhead:
    """Iterations over one dataset, up to `depth` batches of which a thread reads in advance."""

    def __init__(self, depth: int, order: RandomOrder | None = None) -> None:
        """`depth` 0: no thread. `order` has the random numbers of the dataset's order."""
        self._depth, self._order = depth, order
        self._threads: list[ReaderThread] = []

    def read(self, batches: Batches) -> Batches:
        """The same batches.

        The thread starts with the first request. It ends with the batches; where this generator is
        closed or deleted earlier, it ends after the batch that it is reading. The random numbers
        then go on from the last batch that was given out, as without the thread. An exception of
        the batches is raised here in its place, with the original traceback.
        """
        if self._depth == 0:
            yield from batches
            return
        # A dataset need not allow two iterations at a time.
        for thread in self._threads:
            if thread.stopped.is_set():
                thread.join()
        reader = _Reader(batches, self._depth, self._order)
        self._threads = [*filter(ReaderThread.is_alive, self._threads), reader.thread]
        try:
            while not isinstance(batch := reader.next_batch(), _End):
                yield batch
            reader.thread.delivered = True
            if batch.error is not None:
                raise batch.error
        finally:
            reader.stop()


class _Reader:
    def __init__(self, batches: Batches, depth: int, order: RandomOrder | None) -> None:
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._free_slots = threading.Semaphore(depth)
        self._order, self._restores = order, False
        self._state = self._now()
        self.thread = ReaderThread(partial(self._read, batches))
        self.thread.start()

    def _now(self) -> Any:
        return None if self._order is None else self._order.state()

    def next_batch(self) -> Any:
        """The next batch or `_End`; waits for it."""
        batch, self._state = self._ready.get()
        self._free_slots.release()
        return batch

    def stop(self) -> None:
        """End the thread after the batch that it is reading."""
        self.thread.stopped.set()
        self._free_slots.release()
        # The thread may still draw, and has drawn for batches that nobody takes.
        if self.thread is threading.current_thread():  # within the garbage collector
            self._restores = True
        elif self._state is not None and not sys.is_finalizing():
            self.thread.join()
            self._restore()

    def _restore(self) -> None:
        if self._order is not None and self._state is not None:
            self._order.restore(self._state)

    def _read(self, batches: Batches) -> None:
        error = None
        try:
            with closing(batches):
                self._free_slots.acquire()
                for batch in batches:
                    self._ready.put((batch, self._now()))
                    self._free_slots.acquire()
                    if self.thread.stopped.is_set():
                        return
        except BaseException as raised:  # SystemExit too: the consumer waits for an answer
            error = raised
        finally:
            # All numbers that it has drawn were for batches that were taken.
            self._ready.put((_End(error), None))
            if self._restores:
                self._restore()
