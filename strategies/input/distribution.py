"""From a user's dataset to this rank's batches of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from collectives import Communicator
from strategies.input.autoshard import Choice, agree_on_choice, checked_options
from strategies.input.batches import arrays_of, contiguous_part
from strategies.input.contexts import InputContext
from strategies.input.digest import digest_of
from strategies.input.distributed import DistributedDataset
from strategies.input.failures import call_together, check_together
from strategies.input.options import AutoShardPolicy, InputOptions
from strategies.input.read_ahead import Batches, read_ahead
from strategies.input.rebatching import rebatched
from strategies.input.sources import batch_size_of, check_iterable, iterate


def distribute(
    communicator: Communicator, dataset: Iterable[Any], options: Any = None
) -> DistributedDataset:
    """`Strategy.experimental_distribute_dataset` between the ranks of the communicator."""
    choice = agree_on_choice(communicator, dataset, options)
    rank, size = communicator.rank, communicator.size
    share = call_together(communicator, lambda: _share(dataset, choice, rank, size))
    begin = partial(_begin, share, checked_options(options))
    if isinstance(share, _Parts):
        return DistributedDataset(communicator, begin, lambda: share.digest)
    return DistributedDataset(communicator, begin)


def distribute_from_function(
    communicator: Communicator,
    dataset_fn: Callable[[InputContext], Iterable[Any]],
    options: Any = None,
) -> DistributedDataset:
    """`Strategy.distribute_datasets_from_function` between the ranks of the communicator."""
    size = communicator.size
    context = InputContext(size, communicator.rank, size)
    asked = check_together(communicator, lambda: _without_sharding(options))
    dataset = call_together(communicator, lambda: dataset_fn(context))
    check_together(communicator, lambda: check_iterable(dataset))
    return DistributedDataset(communicator, partial(_begin, partial(_as_it_is, dataset), asked))


def _without_sharding(options: Any) -> InputOptions:
    asked = checked_options(options)
    if asked.auto_shard_policy is not None or asked.sharding is not None:
        raise ValueError(
            "options ask for sharding, but distribute_datasets_from_function leaves that to the"
            " function: must have neither auto_shard_policy nor sharding"
        )
    return asked


def _begin(share: Callable[[], Batches], options: InputOptions) -> Batches:
    return read_ahead(share(), options.experimental_per_replica_buffer_size)


def _share(dataset: Any, choice: Choice, rank: int, size: int) -> Callable[[], Batches]:
    """What begins an iteration over the rank's share."""
    if choice.policy is AutoShardPolicy.DATA:
        if hasattr(dataset, "with_seed"):  # or each rank would cut batches of its own order
            dataset = dataset.with_seed(choice.seed, 0)
        return _Parts(dataset, rank, size)
    if choice.policy is AutoShardPolicy.FILE:
        dataset = dataset.auto_shard(size, rank)
    if choice.own_seeds:
        dataset = dataset.with_seed(choice.seed, rank)
    return partial(_rebatched, dataset, rank, size)


# Generators, so that what a source raises when its iteration begins is raised at the first step.


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


def _as_it_is(dataset: Any) -> Batches:
    for batch in iterate(dataset):
        arrays_of(batch)
        yield batch
