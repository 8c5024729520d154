"""How variables are split over parameter servers, as `tf.distribute.experimental.partitioners`."""

from strategies.parameter_server.placement import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
