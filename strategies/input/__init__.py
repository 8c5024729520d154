"""Distributed datasets: sharding between ranks, and iteration in step on all of them.

The counterpart of TensorFlow's "Distributed input" guide: AutoShardPolicy, InputOptions,
InputContext, and the part of `tf.data` that arrays and files need.
"""

from strategies.input.dataset import ArraysDataset, Dataset, FileDataset, make_numpy_dataset
from strategies.input.distributed import DistributedDataset, DistributedIterator, NextBatch
from strategies.input.distribution import distribute, distribute_from_function
from strategies.input.element_spec import TensorSpec
from strategies.input.failures import DatasetError
from strategies.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Options,
    ValueContext,
)
from strategies.input.rebatching import batch_sizes_for_worker

__all__ = [
    "ArraysDataset",
    "AutoShardPolicy",
    "Dataset",
    "DatasetError",
    "DistributedDataset",
    "DistributedIterator",
    "FileDataset",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "NextBatch",
    "Options",
    "TensorSpec",
    "ValueContext",
    "batch_sizes_for_worker",
    "distribute",
    "distribute_from_function",
    "make_numpy_dataset",
]
