"""Datasets of `tf.data`, split between the ranks as TensorFlow splits them between workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute as distribute_ops
from tensorflow.python.distribute import input_util

from collectives import Communicator
from strategies.core.same_error import call_on_all

log = logging.getLogger("strategies")

_POLICIES = tf.data.experimental.AutoShardPolicy

# The readers whose files TensorFlow splits (grappler/optimizers/data/auto_shard.cc).
_READERS = (
    "ArrayRecordDataset",
    "FixedLengthRecordDataset",
    "RecordIODataset",
    "SSTableDataset",
    "TextLineDataset",
    "TFRecordDataset",
)

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
    there are fewer files than ranks, and where the dataset combines several sources. DATA reads
    them in a deterministic order. Where the ranks can count the batches that it splits, they do not
    agree on the end at each step.

    ValueError for FILE with fewer files than ranks or with other data, and for elements without
    rows; TypeError for what is no dataset.
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
    policy = _policy(dataset)
    if policy in (_POLICIES.AUTO, _POLICIES.FILE):
        fewest, several = _files(communicator, dataset)
        if policy is _POLICIES.AUTO:
            # FILE would fail during the iteration, on one rank, of fewer files. Files that are
            # zipped with other sources would be split apart from those.
            by_files = communicator.size <= fewest < math.inf and not several
            policy = _POLICIES.FILE if by_files else _POLICIES.DATA
        elif fewest == math.inf:
            raise _without_files()
        elif fewest < communicator.size:
            raise ValueError(
                f"the dataset has {fewest:.0f} files: must have at least {communicator.size}"
                " with AutoShardPolicy.FILE, one for each rank; AutoShardPolicy.DATA splits"
                " batches instead"
            )
    if policy is _POLICIES.DATA:
        dataset = _in_one_order(dataset)
    made = call_on_all(communicator, "distributing the dataset", lambda: make(dataset))
    # What files hold is not known, whatever `repeat().take(n)` or the program says of all.
    trusted = policy is _POLICIES.DATA
    counts = communicator.all_gather_object(int(made.cardinality) if trusted else -1)
    if counts[0] >= 0 and len(set(counts)) == 1:
        made._enable_get_next_as_optional = False
    return made


def distribute_whole_batches(extended: Any, dataset: Any, options: Any) -> Any:
    """As `distribute`, of batches that are meant for one rank each. Collective."""
    _check_dataset(dataset, "experimental_distribute_dataset is given")
    communicator = extended.operations.communicator
    rank, size = communicator.rank, communicator.size
    length = int(distribute_ops.compute_batch_size(dataset))
    padded = any(
        each.shape.rank is None or not each.shape[1:].is_fully_defined()
        for each in _tensor_specs(dataset)
    )
    if length < 1 or padded:
        # Their rows can't be counted, or not be joined.
        return distribute_from_function(extended, lambda _: dataset.shard(size, rank), options)
    return distribute(extended, dataset.rebatch(length * size), options)


def distribute_from_function(extended: Any, dataset_fn: Callable[..., Any], options: Any) -> Any:
    """The dataset that the function makes for this rank, whose batches are not split. Collective.

    An error of the function on one rank is raised on every rank. Where the ranks' numbers of
    batches differ, no rank uses its own: the ranks agree on the end at each step.
    """
    options = _on_host(options)
    specs: list[Any] = []

    def checked(context: Any) -> Any:
        dataset = dataset_fn(context)
        _check_dataset(dataset, "dataset_fn returned")
        specs[:] = _tensor_specs(dataset)
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


def _without_files() -> ValueError:
    return ValueError(
        "the dataset has sources that aren't files which TensorFlow splits, as TFRecordDataset,"
        " TextLineDataset and FixedLengthRecordDataset read them: AutoShardPolicy.FILE can't split"
        " them; AutoShardPolicy.DATA splits batches instead"
    )


def _files(communicator: Communicator, dataset: Any) -> tuple[float, bool]:
    """The least number of files, or of other elements, that TensorFlow would split on any rank.

    Infinity where it would split none. And whether any rank's dataset has several sources.
    """
    size = communicator.size

    def count() -> tuple[float, bool]:
        sources = [
            each for each in _chain(dataset) if not (each._inputs() or _names_of_files(each))
        ]
        counts = [_at_least(files, size) for files in _split(dataset)]
        return min(counts, default=math.inf), len(sources) > 1

    own = call_on_all(communicator, "counting the files", count)
    found = communicator.all_gather_object(own)
    return min(each for each, _ in found), any(several for _, several in found)


def _split(dataset: Any) -> list[Any]:
    """The datasets whose elements TensorFlow would split: what is given to those that read files.

    Of each chain the last one that does.
    """
    names = _names_of_files(dataset)
    if names:
        return names
    inputs: list[Any] = dataset._inputs()
    if _reads_files(dataset):
        return inputs
    return [files for each in inputs for files in _split(each)]


def _reads_files(dataset: Any) -> bool:
    """Whether its function reads files, as that of `interleave` and `flat_map` may."""
    function = getattr(dataset, "_map_func", None)
    if function is None:
        return False
    graph = function.function.graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return any(node.op.startswith(_READERS) for node in nodes)


def _at_least(files: Any, enough: int) -> int:
    """How many different ones there are; where it is not known, up to `enough` are counted."""
    count = int(files.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        return sum(1 for _ in files.take(enough))
    if count == tf.data.INFINITE_CARDINALITY:
        counts = [int(each.cardinality()) for each in _chain(files)]
        return min((each for each in counts if each >= 0), default=enough)
    return count


def _names_of_files(reader: Any) -> list[Any]:
    """The dataset of names that a reader of files keeps."""
    names = getattr(reader, "_filenames", None)
    return [names] if isinstance(names, tf.data.Dataset) else []


def _policy(dataset: Any) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy


def _in_one_order(dataset: Any) -> Any:
    """The dataset with the policy DATA: in another order each rank would keep parts of others."""
    if any(getattr(each, "_deterministic", None) == "false" for each in _chain(dataset)):
        log.warning(
            "the dataset has a step with deterministic=False, so that ranks may read its rows in"
            " different orders: some are lost and others repeated; leave the argument out"
        )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = _POLICIES.DATA
    options.deterministic = True
    return dataset.with_options(options)
