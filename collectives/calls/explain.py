"""Description of the path that a call would take, and of the reason."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.calls.bound_all_to_all import EXCHANGED_BYTES
from collectives.calls.bound_between_nodes import exchanged_reduction
from collectives.calls.bound_small import small_reduction
from collectives.calls.exchanged_rows import room_of_row
from collectives.execution.engine import Engine
from collectives.reductions.reduction import ReduceOp, reduction_for
from collectives.schedules.paths import DISSEMINATION, QUICKEST, SHARED
from collectives.schedules.spec import spec_of
from collectives.shm.selector import PathSelector


def explain(engine: Engine, collective: str, nbytes: int, dtype: np.dtype[Any]) -> str:
    """The path of a SUM, or of a movement, of ordinary arrays of that dtype, and the reason."""
    op = ReduceOp.SUM if spec_of(collective).reduces else None
    if op is not None:
        reduction_for(op, dtype)  # raises TypeError for a dtype without it
    small = collective == "all_reduce" and small_reduction(engine, ReduceOp.SUM, dtype, nbytes)
    if small:
        return f"{SHARED} runs, in a single step: few bytes, whatever is expected"
    if _travels_with_check(engine, collective, nbytes, dtype):
        return f"{DISSEMINATION} runs, with the comparison of the call: few bytes"
    # Movements treat elements as bytes.
    paths = engine.paths(collective, op, np.dtype(np.uint8) if op is None else dtype)
    if engine.size > 1 and engine.choose(collective, nbytes, paths) == QUICKEST:
        route = paths[QUICKEST]
        assert isinstance(route, PathSelector)
        return _measured(route, nbytes)
    choice = engine.price(collective, nbytes, paths)
    return f"{choice}\n  by {engine.costs_source}" if choice.seconds else str(choice)


def _travels_with_check(engine: Engine, collective: str, nbytes: int, dtype: np.dtype[Any]) -> bool:
    """Whether so many bytes travel with the check between nodes, of which each rank has a part."""
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        return exchanged_reduction(engine, collective, ReduceOp.SUM, dtype, nbytes) is not None
    if collective in ("all_gather", "gather"):
        return nbytes <= engine.size * room_of_row(engine, engine.size)
    if collective == "all_to_all":
        return nbytes <= min(EXCHANGED_BYTES, room_of_row(engine, engine.size))
    return collective == "broadcast" and 0 < nbytes <= room_of_row(engine, 1)


def _measured(route: PathSelector, nbytes: int) -> str:
    """One line for each measured path, the fastest first."""
    ways, measured = route.candidates(nbytes), route.seconds(nbytes)
    untried = [way for way in ways if way not in measured]
    if not measured:
        return f"each of {', '.join(untried)} is tried first: not yet measured"
    ranked = sorted(measured, key=lambda way: measured[way])
    lines = [f"  {way:<22}{measured[way] * 1e6:12.1f} µs measured" for way in ranked]
    lines += [f"  {way:<22}not yet measured" for way in untried]
    return "\n".join([f"{ranked[0]} runs: least time in the calls of about that size", *lines])
