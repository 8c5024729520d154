"""The cluster resolvers under their public name, as `tf.distribute.cluster_resolver`."""

from strategies.cluster.resolvers import (
    ClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
]
