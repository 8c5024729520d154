"""Prefix reductions (MPI 4.1, section 6.11)."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp


def refuse_mean(collective: str, op: ReduceOp) -> None:
    """ValueError for "mean"."""
    if op is ReduceOp.MEAN:
        raise ValueError(f"op='mean': {collective} takes every other op, but no mean")


def prefix(
    engine: Engine, collective: str, source: Array, op: ReduceOp, algorithm: str | None = None
) -> Array:
    """The reduction of the ranks up to this one, or below it, in memory of its own.

    On rank 0 nothing lies below: the identity of the op.
    """
    # Schedules fold in place.
    if collective == "scan":
        folded = source.copy()
        engine.run("scan", None, folded, op=op, algorithm=algorithm)
        return folded
    both = np.empty(2 * len(source), source.dtype)
    both[: len(source)] = source
    if engine.rank == 0:
        both[len(source) :] = identity(op, source.dtype)
    lengths = [len(source)] * 2
    engine.run("exscan", None, both, lengths=lengths, op=op, algorithm=algorithm)
    return both[len(source) :]


def identity(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """The element that leaves every other one as it is when both are reduced."""
    if op is ReduceOp.BITWISE_AND:
        return ~np.zeros((), dtype)
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return int(op is ReduceOp.PRODUCT)
    least = op is ReduceOp.MIN
    if dtype.kind == "b":
        return least
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if least else np.iinfo(dtype).min
    return np.inf if least else -np.inf
