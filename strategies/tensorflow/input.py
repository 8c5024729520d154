"""Datasets of `tf.data`, split between the ranks as TensorFlow splits them between workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute as distribute_ops
from tensorflow.python.distribute import input_util

from collectives import Communicator
from strategies.core.same_error import PropagatedErrors, call_on_all
from strategies.tensorflow.files import chain, files_of, split_of
from strategies.tensorflow.seeds import orders_of, warn_of_orders

log = logging.getLogger("strategies")

_POLICIES = tf.data.experimental.AutoShardPolicy

_DISTRIBUTE = "experimental_distribute_dataset"

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
    there are fewer files than ranks or their number isn't known, and where the dataset combines
    several sources. DATA reads them in a deterministic order. Where the ranks can count the batches
    that it splits, they do not agree on the end at each step.

    ValueError for FILE with fewer files than ranks, if their number is known, or with other data,
    and for elements without rows; TypeError for what is no dataset.
    """
    communicator = extended.operations.communicator
    alone = communicator.size == 1
    with PropagatedErrors(communicator, _DISTRIBUTE):
        options = _on_host(options)
        _check_dataset(dataset, f"{_DISTRIBUTE} is given")
        if not alone and any(each.shape.rank == 0 for each in _tensor_specs(dataset)):
            raise ValueError(
                f"the dataset's elements are {dataset.element_spec}: must be batches, whose rows"
                " are split between the ranks; call batch() first"
            )

    def make(source: Any) -> Any:
        try:
            return input_util.get_distributed_dataset(
                source,
                extended._input_workers_with_options(options),
                extended._container_strategy(),
                num_replicas_in_sync=None if alone else communicator.size,
                input_context=None if alone else extended._input_context(),
                options=options,
            )
        except tf.errors.NotFoundError as error:
            if "unshardable" not in str(error):
                raise
            raise _without_files() from error

    if alone or not tf.executing_eagerly():
        return make(dataset)
    given = dataset.options().experimental_distribute.auto_shard_policy.name
    dtypes = tf.nest.map_structure(lambda each: each.dtype.name, _tensor_specs(dataset))
    communicator.barrier(f"experimental_distribute_dataset, AutoShardPolicy.{given}, of {dtypes}")
    policy = _agreed_policy(communicator, dataset)
    if policy is _POLICIES.DATA:
        dataset = _in_one_order(dataset)
    made = call_on_all(communicator, "distributing the dataset", lambda: make(dataset))
    # What files hold is not known, whatever `repeat().take(n)` or the program says of all.
    own = int(made.cardinality) if policy is _POLICIES.DATA else -1
    # The rest each rank does with its own part.
    split = {_POLICIES.DATA: [dataset], _POLICIES.FILE: split_of(dataset)}
    orders = orders_of(split.get(policy, []))
    every = communicator.all_gather_object((own, made._enable_get_next_as_optional, orders))
    counts, optional, all_orders = zip(*every, strict=True)
    if communicator.rank == 0:
        warn_of_orders(all_orders)
    counted = counts[0] >= 0 and len(set(counts)) == 1
    # One rank's own dataset may have no end.
    made._enable_get_next_as_optional = any(optional) and not counted
    return made


def _agreed_policy(communicator: Communicator, dataset: Any) -> Any:
    """What the ranks' datasets follow. ValueError on every rank for FILE without enough files."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy not in (_POLICIES.AUTO, _POLICIES.FILE):
        return policy
    files = files_of(communicator, dataset)
    few = files.fewest < communicator.size
    if policy is _POLICIES.AUTO:
        # FILE would fail during the iteration, on one rank, of fewer files. Files that are zipped
        # with other sources would be split apart from those.
        by_files = files.any and files.known and not few and not files.several
        return _POLICIES.FILE if by_files else _POLICIES.DATA
    if not files.any:
        raise _without_files()
    if few:
        raise ValueError(
            f"the dataset has {files.fewest:.0f} files: must have at least {communicator.size}"
            " with AutoShardPolicy.FILE, one for each rank; AutoShardPolicy.DATA splits batches"
            " instead"
        )
    return policy


def distribute_whole_batches(extended: Any, dataset: Any, options: Any) -> Any:
    """As `distribute`, of batches that are meant for one rank each. Collective."""
    communicator = extended.operations.communicator
    rank, size = communicator.rank, communicator.size
    with PropagatedErrors(communicator, _DISTRIBUTE):
        _check_dataset(dataset, f"{_DISTRIBUTE} is given")

    def shard(_: Any) -> Any:
        return dataset.shard(size, rank)

    if not tf.executing_eagerly():
        return distribute_from_function(extended, shard, options)
    length = int(distribute_ops.compute_batch_size(dataset))
    padded = any(
        each.shape.rank is None or not each.shape[1:].is_fully_defined()
        for each in _tensor_specs(dataset)
    )
    if length < 1 or padded:
        # Their rows can't be counted, or not be joined.
        return distribute_from_function(extended, shard, options)
    return distribute(extended, dataset.rebatch(length * size), options)


def distribute_from_function(extended: Any, dataset_fn: Callable[..., Any], options: Any) -> Any:
    """The dataset that the function makes for this rank, whose batches are not split. Collective.

    An error of the function on one rank is raised on every rank. Where the ranks' numbers of
    batches differ, no rank uses its own: the ranks agree on the end at each step.
    """
    specs: list[Any] = []

    def checked(context: Any) -> Any:
        dataset = dataset_fn(context)
        _check_dataset(dataset, "dataset_fn returned")
        specs[:] = _tensor_specs(dataset)
        return dataset

    def make() -> Any:
        on_host = _on_host(options)
        return input_util.get_distributed_datasets_from_function(
            checked,
            extended._input_workers_with_options(on_host),
            [extended._input_context()],
            extended._container_strategy(),
            options=on_host,
        )

    communicator = extended.operations.communicator
    if communicator.size == 1 or not tf.executing_eagerly():
        return make()
    made = call_on_all(communicator, "distribute_datasets_from_function", make)
    lengths = communicator.all_gather_object(int(made.cardinality))
    scalars = bool(specs) and all(each.shape.rank == 0 for each in specs)
    if scalars and len(set(lengths)) > 1 and tf.data.UNKNOWN_CARDINALITY not in lengths:
        raise ValueError(
            f"the dataset's elements are {made.element_spec}: must be batches where the ranks have"
            " different numbers of them, since a rank without more gets one without rows; call"
            " batch() first"
        )
    if len(set(lengths)) > 1:
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
    if not isinstance(options, tf.distribute.InputOptions):
        raise TypeError(
            f"options is a {type(options).__name__}: must be tf.distribute.InputOptions"
        )
    return options._replace(
        experimental_fetch_to_device=False,
        experimental_replication_mode=_HOST.experimental_replication_mode,
    )


def _without_files() -> ValueError:
    return ValueError(
        "the dataset has sources that aren't files which TensorFlow splits, as TFRecordDataset,"
        " TextLineDataset and FixedLengthRecordDataset read them: AutoShardPolicy.FILE can't split"
        " them; AutoShardPolicy.DATA splits batches instead"
    )


def _in_one_order(dataset: Any) -> Any:
    """The dataset with the policy DATA: in another order each rank would keep parts of others."""
    if any(getattr(each, "_deterministic", None) == "false" for each in chain(dataset)):
        log.warning(
            "the dataset has a step with deterministic=False, so that ranks may read its rows in"
            " different orders: some are lost and others repeated; leave the argument out"
        )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = _POLICIES.DATA
    options.deterministic = True
    return dataset.with_options(options)
