"""A chief that schedules functions on workers, in the manner of `tf.distribute.coordinator`."""

from strategies.coordinator.coordinator import ClusterCoordinator
from strategies.coordinator.per_worker import PerWorkerDataset, PerWorkerIterator, PerWorkerValue
from strategies.coordinator.remote_value import RemoteValue

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "RemoteValue",
]
