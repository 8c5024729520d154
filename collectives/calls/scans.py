"""scan and exscan: prefix reductions (MPI 4.1, section 6.11).

Device arrays are staged through the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.calls import Operation
from collectives.calls.reductions import ReduceInput
from collectives.consistency.signature import forced
from collectives.cuda.runtime import fetched, filled
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp, reduction_for


def scan(array: Any, op: ReduceOp | str, out: Any, algorithm: str | None) -> Operation:
    """The reduction of the arrays of all ranks up to this one."""

    def perform(engine: Engine, source: Array, op: ReduceOp) -> Array:
        engine.run("scan", None, source, op=op, algorithm=algorithm)
        return source

    return _prefix("scan", array, op, out, algorithm, perform)


def exscan(array: Any, op: ReduceOp | str, out: Any, algorithm: str | None) -> Operation:
    """The reduction of the arrays of all ranks below this one; the identity on rank 0."""

    def perform(engine: Engine, source: Array, op: ReduceOp) -> Array:
        if engine.rank == 0:
            below = np.full(len(source), identity(op, source.dtype), source.dtype)
        else:
            below = np.empty_like(source)
        both = np.concatenate([source, below])
        lengths = [len(source)] * 2
        engine.run("exscan", None, both, lengths=lengths, op=op, algorithm=algorithm)
        return both[len(source) :]

    return _prefix("exscan", array, op, out, algorithm, perform)


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


def _prefix(
    collective: str,
    array: Any,
    op: ReduceOp | str,
    out: Any,
    algorithm: str | None,
    perform: Callable[[Engine, Array, ReduceOp], Array],
) -> Operation:
    algorithms.check_name(collective, algorithm)
    given = ReduceInput(array, op)
    if given.op is ReduceOp.MEAN:
        raise ValueError(f"op='mean': {collective} takes every other op, but no mean")
    reduction_for(given.op, given.dtype)  # as on the CPU
    output = given.output(out)
    elements = given.flat()

    def run(engine: Engine) -> Any:
        # A copy, because a schedule folds in place.
        source = fetched(elements) if given.on_gpu else elements.copy()
        folded = perform(engine, source, given.op)
        if given.on_gpu:
            filled(output.buffer, folded)
        else:
            output.buffer[:] = folded
        return output.deliver()

    return Operation(given.signature(collective, detail=forced(algorithm)), run, given.on_gpu)
