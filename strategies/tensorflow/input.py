"""Datasets of `tf.data`, split between the ranks as TensorFlow splits them between workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import cardinality
from tensorflow.python.data.experimental.ops import distribute as distribute_ops
from tensorflow.python.distribute import input_util

from collectives import Communicator
from strategies.core.same_error import call_on_all

_POLICIES = tf.data.experimental.AutoShardPolicy

# An iterator of one device, in host memory. TensorFlow's default is MultiDeviceIterator, which
# frees its dataset before its thread has ended, so that a process may end by SIGSEGV where an
# iterator is dropped (TensorFlow 2.21, core/kernels/data/multi_device_iterator_ops.cc).
_HOST = tf.distribute.InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
)


def distribute(extended: Any, dataset: Any, options: Any) -> Any:
    """This rank's part of each global batch, or of the files, by the dataset's policy. Collective.

    A policy that one rank cannot follow raises an error on every rank. AUTO follows DATA where
    there are fewer files than ranks. Where the ranks can count the batches, they do not agree on
    the end at each step.

    ValueError for FILE with fewer files than ranks, and for elements without rows; TypeError for
    what is no dataset.
    """
    communicator, options = extended.operations.communicator, _on_host(options)
    alone = communicator.size == 1
    _check_dataset(dataset, "experimental_distribute_dataset is given")
    if not alone and any(each.shape.rank == 0 for each in _tensor_specs(dataset)):
        raise ValueError(
            f"the dataset's elements are {dataset.element_spec}: must be batches, whose rows are"
            " split between the ranks; call batch() first"
        )

    def make(source: Any) -> Any:
        return input_util.get_distributed_dataset(
            source,
            extended._input_workers_with_options(options),
            extended._container_strategy(),
            num_replicas_in_sync=None if alone else communicator.size,
            input_context=None if alone else extended._input_context(),
            options=options,
        )

    if alone or not tf.executing_eagerly():
        return make(dataset)
    policy = _policy(dataset)
    if policy in (_POLICIES.AUTO, _POLICIES.FILE):
        fewest = _fewest_elements(communicator, dataset)
        if fewest < communicator.size:
            if policy is _POLICIES.FILE:
                raise ValueError(
                    f"the dataset has {fewest:.0f} files: must have at least {communicator.size}"
                    " with AutoShardPolicy.FILE, one for each rank; AutoShardPolicy.DATA splits"
                    " batches instead"
                )
            # FILE would fail during the iteration, on one rank, if these are files.
            policy = _POLICIES.DATA
            dataset = _with_policy(dataset, policy)
    made = call_on_all(communicator, "distributing the dataset", lambda: make(dataset))
    # The cardinality of files is unknown unless the program asserts it, and AUTO may split files.
    trusted = policy is _POLICIES.DATA or (
        policy is _POLICIES.AUTO and not any(_asserts(each) for each in _chain(dataset))
    )
    counts = communicator.all_gather_object(int(made.cardinality) if trusted else -1)
    if counts[0] >= 0 and len(set(counts)) == 1:
        made._enable_get_next_as_optional = False
    return made


def joined(dataset: Any, count: int) -> Any:
    """Batches of as many rows as `count` of the dataset's batches.

    Raises ValueError for a dataset whose batches have no constant length.
    """
    _check_dataset(dataset, "experimental_distribute_dataset is given")
    length = int(distribute_ops.compute_batch_size(dataset))
    if length < 1:
        raise ValueError("LocalSGDStrategy distributes datasets whose last operation is batch()")
    return dataset.rebatch(length * count)


def distribute_from_function(extended: Any, dataset_fn: Callable[..., Any], options: Any) -> Any:
    """The dataset that the function makes for this rank, whose batches are not split. Collective.

    An error of the function on one rank is raised on every rank. Where the ranks' numbers of
    batches differ, no rank uses its own: the ranks agree on the end at each step.
    """
    options = _on_host(options)

    def checked(context: Any) -> Any:
        dataset = dataset_fn(context)
        _check_dataset(dataset, "dataset_fn returned")
        return dataset

    def make() -> Any:
        return input_util.get_distributed_datasets_from_function(
            checked,
            extended._input_workers_with_options(options),
            [extended._input_context()],
            extended._container_strategy(),
            options=options,
        )

    communicator = extended.operations.communicator
    if communicator.size == 1 or not tf.executing_eagerly():
        return make()
    made = call_on_all(communicator, "distribute_datasets_from_function", make)
    if len(set(communicator.all_gather_object(int(made.cardinality)))) > 1:
        # Keras would end each rank's epoch by the rank's own number.
        made._cardinality = tf.data.UNKNOWN_CARDINALITY
        made._enable_get_next_as_optional = True
    return made


def _check_dataset(dataset: Any, what: str) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"{what} {type(dataset).__name__}: must be a tf.data.Dataset, as"
            " tf.data.Dataset.from_tensor_slices makes one of arrays"
        )


def _tensor_specs(dataset: Any) -> list[Any]:
    specs = tf.nest.flatten(dataset.element_spec)
    return [each for each in specs if isinstance(each, tf.TensorSpec)]


def _on_host(options: Any) -> Any:
    if options is None:
        return _HOST
    return options._replace(
        experimental_fetch_to_device=False,
        experimental_replication_mode=_HOST.experimental_replication_mode,
    )


def _chain(dataset: Any) -> Iterator[Any]:
    """The dataset and those that it reads from."""
    left = [dataset]
    while left:
        each = left.pop()
        left.extend(each._inputs() or _names_of_files(each))
        yield each


def _asserts(dataset: Any) -> bool:
    return isinstance(dataset, cardinality._AssertCardinalityDataset)


def _fewest_elements(communicator: Communicator, dataset: Any) -> float:
    """The least number of elements, such as files, of any source of any rank's dataset."""
    sources = [each for each in _chain(dataset) if not (each._inputs() or _names_of_files(each))]
    counts = [int(each.cardinality()) for each in sources]
    fewest = min((each for each in counts if each >= 0), default=math.inf)
    return float(min(communicator.all_gather_object(fewest)))


def _names_of_files(reader: Any) -> list[Any]:
    """The dataset of names that a reader of files keeps."""
    names = getattr(reader, "_filenames", None)
    return [names] if isinstance(names, tf.data.Dataset) else []


def _policy(dataset: Any) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy


def _with_policy(dataset: Any, policy: Any) -> Any:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)
