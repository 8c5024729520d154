"""Ways to reduce the replicas' values, to choose from or to write."""

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
