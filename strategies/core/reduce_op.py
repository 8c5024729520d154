"""The two reductions of strategies, as `tf.distribute.ReduceOp`."""

from __future__ import annotations

import enum
from typing import Any


class ReduceOp(enum.Enum):
    """SUM or MEAN over the replicas; the strings do as well, in any case."""

    SUM = "SUM"
    MEAN = "MEAN"


def as_reduce_op(op: Any) -> ReduceOp:
    """The op that `op` names; ValueError for anything else."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    raise ValueError(f"reduce_op={op!r}: must be ReduceOp.SUM, ReduceOp.MEAN or one of their names")
