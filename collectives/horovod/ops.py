"""Horovod's arguments `op` and `average`, and those that calls compare as text."""

from __future__ import annotations

from collectives.reductions.reduction import ReduceOp, as_op

Op = ReduceOp | str | None


def op_of(op: Op, average: bool | None) -> ReduceOp:
    """Horovod's older argument, or the newer one."""
    if not isinstance(average, bool | None):
        raise TypeError(f"average={average!r}: must be a bool; give other arguments by their names")
    if average is None:
        return ReduceOp.MEAN if op is None else as_op(op)
    if op is not None:
        raise ValueError("average and op were both given: leave out average, the older one")
    return ReduceOp.MEAN if average else ReduceOp.SUM


def text_of(name: str | None, prescale: float = 1.0, postscale: float = 1.0) -> str | None:
    """What must be equal on all ranks, and no tensor shows; None where all of it is the default."""
    parts = [] if name is None else [f"name={name}"]
    if (prescale, postscale) != (1.0, 1.0):
        parts.append(f"factors {float(prescale)} and {float(postscale)}")
    return ", ".join(parts) or None
