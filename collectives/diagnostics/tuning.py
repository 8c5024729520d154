"""Measurement of the paths, so that the cost model selects by measured parameters.

The ring, recursive doubling, MPI's own all_reduce and the node's memory are timed for a small and a
few larger sizes, which takes a second or two. The cost parameters fitted to the times
(`execution.calibration`) apply to the other collectives too, which use the same mechanisms. With
shared memory on several nodes, all nodes are timed at once.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from collectives.calls import Operation
from collectives.calls.objects import broadcast_pickle, numbers_of_all
from collectives.consistency.signature import Signature
from collectives.execution import cost_model
from collectives.execution.calibration import SMALL_BYTES, Seconds, fit
from collectives.execution.cost_model import BUILT_IN, LARGEST_PRICED, CostParameters
from collectives.execution.engine import Engine
from collectives.execution.parameters_file import Key, load, save
from collectives.reductions.reduction import Array, ReduceOp, reduction_for
from collectives.schedules.paths import NATIVE, SHARED

TUNED = "parameters measured now"

_SIZES = (SMALL_BYTES, 64 << 10, 1 << 20, 4 << 20)
_SCHEDULES = ("ring", "doubling")
_REPEATS, _FEWEST_REPEATS = 5, 2
_REPEAT_SECONDS = 0.006
_MOST_CALLS = 30
_FOLD_BYTES = 128 << 10
_DTYPE = np.dtype(np.float32)

Run = Callable[[Array, Array], Any]
"""One all_reduce, from the first array into the second."""


def use_saved(engine: Engine) -> None:
    """Use the cost parameters that rank 0 has on disk, if there are any. Collective."""
    engine.use(cost_model.built_in(engine.layout), BUILT_IN)
    if engine.size == 1:
        return
    found = broadcast_pickle(engine, lambda: _saved(engine))
    if found is not None:
        engine.use(*found)


def _saved(engine: Engine) -> tuple[CostParameters, str] | None:
    found = load(_key(engine))
    return None if found is None else (found[0], f"parameters from {found[1]}")


def _key(engine: Engine) -> Key:
    return Key(platform.node(), engine.transport.library, engine.layout)


def tune(*, save: bool) -> Operation:
    """Measure, use the result from now on, and save it for later runs; returns a report."""
    return Operation(
        Signature("tune", detail=f"save={bool(save)}"), lambda engine: _tune(engine, save)
    )


def _tune(engine: Engine, keep: bool) -> str:
    if not 1 < engine.size <= LARGEST_PRICED:
        return f"{_counted(engine.size, 'rank')}: the cost model is not used, nothing is measured"
    seconds, reduction = measure(engine)

    def conclude() -> tuple[CostParameters, str]:
        """On rank 0 only: the other ranks receive the same bits."""
        costs = parameters_for(engine, seconds, reduction)
        path = save(_key(engine), costs) if keep else None
        where = "not saved" if path is None else f"saved in {path}"
        return costs, "\n".join([_heading(engine), *_report(costs, seconds), where])

    costs, text = broadcast_pickle(engine, conclude)
    engine.use(costs, TUNED)
    engine.path = ""
    return str(text)


def parameters_for(engine: Engine, seconds: Seconds, reduction: float) -> CostParameters:
    """Cost parameters fitted to the measured times; the others keep their defaults."""
    layout = engine.layout
    kinds = {path: path if path in (NATIVE, SHARED) else "schedule" for path, _ in seconds}

    def model(path: str, nbytes: int, costs: CostParameters) -> float:
        return cost_model.expected("all_reduce", path, nbytes, layout, costs)

    return fit(seconds, model, replace(cost_model.built_in(layout), reduction=reduction), kinds)


# Measuring


def measure(engine: Engine) -> tuple[Seconds, float]:
    """Seconds of each path, and bytes folded per second, of the slowest rank, on every rank."""
    largest = max(_SIZES) // _DTYPE.itemsize
    source, target = np.ones(largest, _DTYPE), np.ones(largest, _DTYPE)
    seconds: dict[tuple[str, int], float] = {}
    for path, run in _runs(engine).items():
        for nbytes in _SIZES:
            length = nbytes // _DTYPE.itemsize
            seconds[path, nbytes] = _time(engine, run, source[:length], target[:length])
    fold, length = reduction_for(ReduceOp.SUM, _DTYPE).fold, _FOLD_BYTES // _DTYPE.itemsize
    taken = _time(
        engine, lambda given, out: fold(given, out, out), source[:length], target[:length]
    )
    return seconds, _FOLD_BYTES / taken


def _runs(engine: Engine) -> dict[str, Run]:
    def forced(name: str) -> Run:
        return lambda source, target: engine.run(
            "all_reduce", source, target, op=ReduceOp.SUM, algorithm=name
        )

    names = [*_SCHEDULES]
    if NATIVE in engine.paths("all_reduce", ReduceOp.SUM, _DTYPE):
        names.append(NATIVE)
    runs = {name: forced(name) for name in names}
    if engine.node is not None:
        runs[SHARED] = _within_node(engine)
    return runs


def _within_node(engine: Engine) -> Run:
    assert engine.node is not None
    shared = engine.node.shared("all_reduce", ReduceOp.SUM, _DTYPE)
    if engine.node.steps.size > 1:
        return lambda source, target: engine.errstate.run(shared, source, target, (), 0)
    return lambda source, target: None


def _time(engine: Engine, run: Run, source: Array, target: Array) -> float:
    """Seconds of one call on the slowest rank: the least of the repeats, because of other load."""
    first = _slowest(engine, _elapsed(run, source, target, 1))
    calls = max(1, min(_MOST_CALLS, int(_REPEAT_SECONDS / first)))
    repeats = max(_FEWEST_REPEATS, min(_REPEATS, int(_REPEATS * _REPEAT_SECONDS / first)))
    return min(
        _slowest(engine, _elapsed(run, source, target, calls)) / calls for _ in range(repeats)
    )


def _elapsed(run: Run, source: Array, target: Array, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run(source, target)
    return time.perf_counter() - start


def _slowest(engine: Engine, seconds: float) -> float:
    """The longest time of any rank; also synchronizes the ranks."""
    return max(1, *(slowest for slowest, _ in numbers_of_all(engine, int(seconds * 1e9)))) / 1e9


# Report


def _heading(engine: Engine) -> str:
    sizes = engine.layout.local_sizes
    ranks, nodes = _counted(engine.size, "rank"), _counted(len(sizes), "node")
    library = engine.transport.library.split(",")[0]
    return f"measured with {ranks} on {nodes} ({platform.node()}, {library}):"


def _report(costs: CostParameters, seconds: Seconds) -> list[str]:
    """One line for each kind of path that was measured, and one for the reduction."""
    measured = {path for path, _ in seconds}
    kinds = ["schedule", *(kind for kind in (NATIVE, SHARED) if kind in measured)]
    lines = [
        f"  {kind:<10}start {getattr(costs, f'{kind}_start') * 1e6:.1f} µs,"
        f" latency {getattr(costs, f'{kind}_latency') * 1e6:.1f} µs,"
        f" {getattr(costs, f'{kind}_bandwidth') / 1e9:.1f} GB/s"
        for kind in kinds
    ]
    return [*lines, f"  reduction {costs.reduction / 1e9:.1f} GB/s"]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
