"""Datasets of `tf.data`, split between the ranks as TensorFlow splits them between workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute as distribute_ops
from tensorflow.python.distribute import input_util

from collectives import Communicator

_POLICIES = tf.data.experimental.AutoShardPolicy


def distribute(extended: Any, dataset: Any, options: Any) -> Any:
    """This rank's part of each global batch, or of the files, by the dataset's policy. Collective.

    A policy that one rank cannot follow raises an error on every rank. AUTO follows DATA where
    there are fewer files than ranks. Where the ranks can count the batches, they do not agree on
    the end at each step.
    """
    communicator = extended.operations.communicator

    def make(source: Any) -> Any:
        return input_util.get_distributed_dataset(
            source,
            extended._input_workers_with_options(options),
            extended._container_strategy(),
            num_replicas_in_sync=communicator.size,
            input_context=extended._input_context(),
            options=options,
        )

    if communicator.size == 1:
        return input_util.get_distributed_dataset(
            dataset,
            extended._input_workers_with_options(options),
            extended._container_strategy(),
            options=options,
        )
    if not tf.executing_eagerly():
        return make(dataset)
    policy = _policy(dataset)
    if policy is _POLICIES.AUTO and _fewest_elements(communicator, dataset) < communicator.size:
        # FILE would fail during the iteration, on one rank, if these are files.
        policy = _POLICIES.DATA
        dataset = _with_policy(dataset, policy)
    made, failure = _attempt(make, dataset)
    failures = communicator.all_gather_object(failure and repr(failure))
    if failure is not None:
        raise failure
    if any(failures):
        raise ValueError(f"distributing the dataset failed on other ranks: {failures}")
    counts = communicator.all_gather_object(int(made.cardinality))
    splits_batches = policy in (_POLICIES.AUTO, _POLICIES.DATA)
    if splits_batches and counts[0] >= 0 and len(set(counts)) == 1:
        made._enable_get_next_as_optional = False
    return made


def joined(dataset: Any, count: int) -> Any:
    """Batches of as many rows as `count` of the dataset's batches.

    Raises ValueError for a dataset whose batches have no constant length.
    """
    length = int(distribute_ops.compute_batch_size(dataset))
    if length < 1:
        raise ValueError("LocalSGDStrategy distributes datasets whose last operation is batch()")
    return dataset.rebatch(length * count)


def distribute_from_function(extended: Any, dataset_fn: Callable[..., Any], options: Any) -> Any:
    """The dataset that the function makes for this rank, whose batches are not split."""
    return input_util.get_distributed_datasets_from_function(
        dataset_fn,
        extended._input_workers_with_options(options),
        [extended._input_context()],
        extended._container_strategy(),
        options=options,
    )


def _fewest_elements(communicator: Communicator, dataset: Any) -> float:
    """The least number of elements, such as files, of any source of any rank's dataset."""
    fewest, left = math.inf, [dataset]
    while left:
        each = left.pop()
        inputs = each._inputs() or _names_of_files(each)
        left.extend(inputs)
        count = int(each.cardinality()) if not inputs else -1
        fewest = min(fewest, count if count >= 0 else math.inf)
    return float(min(communicator.all_gather_object(fewest)))


def _names_of_files(reader: Any) -> list[Any]:
    """The dataset of names that a reader of files keeps."""
    names = getattr(reader, "_filenames", None)
    return [names] if isinstance(names, tf.data.Dataset) else []


def _attempt(make: Callable[[Any], Any], dataset: Any) -> tuple[Any, Exception | None]:
    try:
        return make(dataset), None
    except Exception as error:
        return None, error


def _policy(dataset: Any) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy


def _with_policy(dataset: Any, policy: Any) -> Any:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)
