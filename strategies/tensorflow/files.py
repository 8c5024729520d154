"""Which files TensorFlow would split between the ranks, as its AutoShardPolicy does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from collectives import Communicator
from strategies.core.same_error import call_on_all

# The readers whose files TensorFlow splits (grappler/optimizers/data/auto_shard.cc).
_READERS = (
    "ArrayRecordDataset",
    "FixedLengthRecordDataset",
    "RecordIODataset",
    "SSTableDataset",
    "TextLineDataset",
    "TFRecordDataset",
)
# And those whose function it looks into.
_CALLING = ("FlatMapDataset", "InterleaveDataset", "ParallelInterleaveDataset")
# Those that give the elements of their input, and no others.
_KEEPING = (
    "CacheDataset",
    "MapDataset",
    "OptionsDataset",
    "ParallelMapDataset",
    "PrefetchDataset",
    "RepeatDataset",
    "ShuffleAndRepeatDataset",
    "ShuffleDataset",
)


class Files(NamedTuple):
    """What TensorFlow would split by files."""

    fewest: float
    """The least number of files, or of other elements, that is known."""
    known: bool
    """Whether all numbers are."""
    several: bool
    """Whether the dataset has several sources."""
    any: bool
    """Whether any source can be split."""


def files_of(communicator: Communicator, dataset: Any) -> Files:
    """The least of all ranks' datasets; `several` where any rank's has several sources."""

    def count() -> Files:
        sources = [each for each in chain(dataset) if not (each._inputs() or _names_of_files(each))]
        counts = list(map(_number_of, split_of(dataset)))
        known = [each for each in counts if each is not None]
        fewest = min(known, default=math.inf)
        return Files(fewest, len(known) == len(counts), len(sources) > 1, bool(counts))

    own = call_on_all(communicator, "counting the files", count)
    fewest, known, several, some = zip(*communicator.all_gather_object(own), strict=True)
    return Files(min(fewest), all(known), any(several), all(some))


def split_of(dataset: Any) -> list[Any]:
    """The datasets whose elements TensorFlow would split: what is given to those that read files.

    Of each chain the last one that does.
    """
    names = _names_of_files(dataset)
    if names:
        return names
    inputs: list[Any] = dataset._inputs()
    if _reads_files(dataset):
        return inputs
    return [files for each in inputs for files in split_of(each)]


def _reads_files(dataset: Any) -> bool:
    """Whether it is one that TensorFlow looks into, and whose function reads files."""
    if _kind_of(dataset) not in _CALLING:
        return False
    graph = dataset._map_func.function.graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return any(node.op.startswith(_READERS) for node in nodes)


def _number_of(files: Any) -> int | None:
    """The number of distinct files; None if they would have to be read to count them."""
    while _kind_of(files) in _KEEPING:
        (files,) = files._inputs()
    count = int(files.cardinality())
    return count if count >= 0 else None


def _kind_of(dataset: Any) -> str:
    return type(dataset).__name__.lstrip("_")


def _names_of_files(reader: Any) -> list[Any]:
    """The dataset of names that a reader of files keeps."""
    names = getattr(reader, "_filenames", None)
    return [names] if isinstance(names, tf.data.Dataset) else []


def chain(dataset: Any) -> Iterator[Any]:
    """The dataset and those that it reads from."""
    left = [dataset]
    while left:
        each = left.pop()
        left.extend(each._inputs() or _names_of_files(each))
        yield each
