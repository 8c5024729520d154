"""Datasets between ranks: each rank's share, and an end that all agree on.

TensorFlow's input side (`tf.distribute`'s "Distributed input"): AutoShardPolicy, InputOptions,
InputContext, and a small part of `tf.data` for arrays and files.
"""

from strategies.input.arrays_dataset import ArraysDataset, make_numpy_dataset
from strategies.input.contexts import InputContext, ValueContext
from strategies.input.dataset import Dataset
from strategies.input.distributed import DistributedDataset, DistributedIterator, NextBatch
from strategies.input.distribution import distribute, distribute_from_function
from strategies.input.element_spec import TensorSpec
from strategies.input.failures import DatasetError
from strategies.input.file_dataset import FileDataset
from strategies.input.options import AutoShardPolicy, InputOptions, InputReplicationMode, Options
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
