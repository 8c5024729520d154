"""Cross-device ops: algorithms that reduce the replicas' values, and the base for new ones."""

from strategies.cross_device_ops.base import CrossDeviceOps
from strategies.cross_device_ops.ops import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "RingAllReduce",
]
