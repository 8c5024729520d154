"""A chief that schedules functions on workers, in the manner of `tf.distribute.coordinator`."""

from strategies.coordinator.coordinator import ClusterCoordinator
from strategies.coordinator.values import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValue,
    RemoteValue,
)

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "RemoteValue",
]
