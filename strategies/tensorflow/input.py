"""Datasets of `tf.data`, split between the ranks as TensorFlow splits them between workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_util

log = logging.getLogger("strategies")

_POLICIES = tf.data.experimental.AutoShardPolicy


def distribute(extended: Any, dataset: Any, options: Any) -> Any:
    """This rank's part of each global batch, or of the files, by the dataset's policy. Collective.

    A policy that one rank cannot follow raises the same error on every rank; AUTO follows DATA
    then. Where the ranks can count the batches they need not agree on the end at each step.
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
    made, failure = _attempt(make, dataset)
    failures = communicator.all_gather_object(failure and repr(failure))
    if any(failures) and _policy(dataset) is _POLICIES.AUTO:
        if communicator.rank == 0:
            log.warning("AutoShardPolicy.AUTO follows DATA, since FILE fails: %s", failures)
        made, failure = _attempt(make, _with_policy(dataset, _POLICIES.DATA))
        failures = communicator.all_gather_object(failure and repr(failure))
    if failure is not None:
        raise failure
    if any(failures):
        raise ValueError(f"distributing the dataset failed on other ranks: {failures}")
    counts = communicator.all_gather_object(int(made.cardinality))
    splits_batches = _policy(dataset) in (_POLICIES.AUTO, _POLICIES.DATA)
    if splits_batches and counts[0] >= 0 and len(set(counts)) == 1:
        made._enable_get_next_as_optional = False
    return made


def distribute_from_function(extended: Any, dataset_fn: Callable[..., Any], options: Any) -> Any:
    """The dataset that the function makes for this rank, whose batches are not split."""
    return input_util.get_distributed_datasets_from_function(
        dataset_fn,
        extended._input_workers_with_options(options),
        [extended._input_context()],
        extended._container_strategy(),
        options=options,
    )


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
