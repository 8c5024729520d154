"""Distribution of a user's dataset: from options and dataset to this rank's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from collectives import Communicator
from strategies.input.autoshard import Sharding, agree_on_sharding, checked_options
from strategies.input.batches import arrays_of, contiguous_part
from strategies.input.distributed import DistributedDataset
from strategies.input.failures import call_together, check_together
from strategies.input.messages import digest_of
from strategies.input.options import AutoShardPolicy, InputContext, InputOptions
from strategies.input.read_ahead import Batches, read_ahead
from strategies.input.rebatching import rebatched
from strategies.input.sources import batch_size_of, check_iterable, iterate


def distribute(
    communicator: Communicator, dataset: Iterable[Any], options: Any = None
) -> DistributedDataset:
    """`Strategy.experimental_distribute_dataset` between the ranks of the communicator."""
    sharding = agree_on_sharding(communicator, dataset, options)
    rank, size = communicator.rank, communicator.size
    shard = call_together(communicator, lambda: _shard(dataset, sharding, rank, size))
    begin = partial(_begin, shard, checked_options(options))
    if isinstance(shard, _Parts):
        return DistributedDataset(communicator, begin, lambda: shard.digest)
    return DistributedDataset(communicator, begin)


def distribute_from_function(
    communicator: Communicator,
    dataset_fn: Callable[[InputContext], Iterable[Any]],
    options: Any = None,
) -> DistributedDataset:
    """`Strategy.distribute_datasets_from_function` between the ranks of the communicator."""
    size = communicator.size
    context = InputContext(size, communicator.rank, size)
    checked = check_together(communicator, lambda: _without_sharding(options))
    dataset = call_together(communicator, lambda: dataset_fn(context))
    check_together(communicator, lambda: check_iterable(dataset))
    return DistributedDataset(communicator, partial(_begin, partial(_unchanged, dataset), checked))


def _without_sharding(options: Any) -> InputOptions:
    checked = checked_options(options)
    if checked.auto_shard_policy is not None or checked.sharding is not None:
        raise ValueError(
            "options request sharding, but distribute_datasets_from_function leaves that to the"
            " function: must have neither auto_shard_policy nor sharding"
        )
    return checked


def _begin(shard: Callable[[], Batches], options: InputOptions) -> Batches:
    return read_ahead(shard(), options.experimental_per_replica_buffer_size)


def _shard(dataset: Any, sharding: Sharding, rank: int, size: int) -> Callable[[], Batches]:
    """A function that begins an iteration over the rank's shard."""
    if sharding.policy is AutoShardPolicy.DATA:
        if hasattr(dataset, "with_seed"):  # else each rank splits batches of a different order
            dataset = dataset.with_seed(sharding.seed, 0)
        return _Parts(dataset, rank, size)
    if sharding.policy is AutoShardPolicy.FILE:
        dataset = dataset.auto_shard(size, rank)
    if sharding.own_seeds:
        dataset = dataset.with_seed(sharding.seed, rank)
    return partial(_rebatched, dataset, rank, size)


# These are generators, so that an exception of `iter(dataset)` is raised at the first step.


class _Parts:
    """The rank's part of every batch of a dataset that all ranks read."""

    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        self._dataset, self._rank, self._size = dataset, rank, size
        self.digest = ""

    def __call__(self) -> Batches:
        for batch in iterate(self._dataset):
            part = contiguous_part(batch, self._rank, self._size)
            self.digest = self.digest or digest_of(batch)
            yield part


def _rebatched(dataset: Any, rank: int, size: int) -> Batches:
    yield from rebatched(iterate(dataset), rank, size, batch_size_of(dataset))


def _unchanged(dataset: Any) -> Batches:
    for batch in iterate(dataset):
        arrays_of(batch)
        yield batch
