"""The older names of `strategies.coordinator`, as `tf.distribute.experimental.coordinator`."""

from strategies.coordinator import ClusterCoordinator, PerWorkerValue, RemoteValue

PerWorkerValues = PerWorkerValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
