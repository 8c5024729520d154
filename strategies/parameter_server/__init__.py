"""Asynchronous training with parameter servers."""

from strategies.parameter_server.placement import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    replica_device_setter,
)
from strategies.parameter_server.storage import ShardedVariable
from strategies.parameter_server.strategy import ParameterServerStrategy

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ParameterServerStrategy",
    "Partitioner",
    "ShardedVariable",
    "replica_device_setter",
]
