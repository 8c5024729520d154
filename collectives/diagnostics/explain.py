"""Description of the path that a call would take, and of the reason."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.bound.all_to_all import EXCHANGED_BYTES, room_of_parts
from collectives.bound.between_nodes import exchanged_reduction, staged_reduction
from collectives.bound.exchanged_rows import room_of_row
from collectives.bound.scatter import bytes_sent
from collectives.bound.small import (
    node_of_all,
    room_beside_arrival,
    room_of_each,
    small_reduction,
)
from collectives.execution.engine import Engine
from collectives.reductions.reduction import ReduceOp, reduction_for
from collectives.schedules.paths import DISSEMINATION, NATIVE, QUICKEST, SLOTS, STAGED
from collectives.schedules.spec import spec_of
from collectives.shm.layout import SMALL_BYTES
from collectives.shm.selector import LARGEST_NATIVE, PathSelector


def explain(engine: Engine, collective: str, nbytes: int, dtype: np.dtype[Any]) -> str:
    """The path of a SUM, or of a movement, of ordinary arrays of that dtype, and the reason."""
    op = ReduceOp.SUM if spec_of(collective).reduces else None
    if op is not None:
        reduction_for(op, dtype)  # raises TypeError for a dtype without it
    if _takes_one_step(engine, collective, nbytes, dtype):
        return f"{SLOTS} runs, in one step: arrays of this size travel with the check of the call"
    if _travels_with_check(engine, collective, nbytes, dtype):
        return f"{DISSEMINATION} runs, with the comparison of the call: few bytes"
    if collective == "all_reduce" and staged_reduction(engine, ReduceOp.SUM, dtype, nbytes):
        return f"{DISSEMINATION} runs, with the comparison of the call: ranks share cores"
    # Movements treat elements as bytes.
    equal = collective == "all_to_all" and node_of_all(engine) is not None
    name = "all_to_all_equal" if equal else collective
    paths = engine.paths(name, op, np.dtype(np.uint8) if op is None else dtype)
    if engine.size > 1 and (equal or engine.choose(collective, nbytes, paths) == QUICKEST):
        selector = paths[QUICKEST]
        assert isinstance(selector, PathSelector)
        if selector.exchanges(nbytes):
            return _measured(selector, nbytes, "" if op is None else f" for {dtype}")
        return f"{STAGED} runs: there are more ranks than cores"
    if collective == "all_to_all" and not equal and NATIVE in paths and nbytes <= LARGEST_NATIVE:
        return f"{NATIVE} runs, where all parts have one size: between nodes"
    choice = engine.price(collective, nbytes, paths)
    return f"{choice}\n  by {engine.costs_source}" if choice.seconds else str(choice)


def _takes_one_step(engine: Engine, collective: str, nbytes: int, dtype: np.dtype[Any]) -> bool:
    """Whether so many bytes lie beside the words that the ranks of a node compare."""
    node = node_of_all(engine)
    if node is None:
        return False
    if spec_of(collective).reduces:
        return small_reduction(engine, ReduceOp.SUM, dtype, nbytes) is not None
    if collective == "scatter":
        return nbytes > 0 and bytes_sent(engine, nbytes, dtype) <= SMALL_BYTES
    most = SMALL_BYTES
    if collective == "broadcast":
        most = room_beside_arrival(node)
    elif collective in ("all_gather", "gather"):
        most = engine.size * room_of_each(node)
    elif collective == "all_to_all":
        most = room_of_parts(engine.size)
    return 0 < nbytes <= most


def _travels_with_check(engine: Engine, collective: str, nbytes: int, dtype: np.dtype[Any]) -> bool:
    """Whether so many bytes travel with the check between nodes, of which each rank has a part."""
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        return exchanged_reduction(engine, collective, ReduceOp.SUM, dtype, nbytes) is not None
    if collective in ("all_gather", "gather"):
        return nbytes <= engine.size * room_of_row(engine, engine.size)
    if collective == "all_to_all":
        return nbytes <= min(EXCHANGED_BYTES, room_of_row(engine, engine.size))
    if collective in ("scan", "exscan"):
        folds = reduction_for(ReduceOp.SUM, dtype).plain_fold is not None
        return folds and 0 < nbytes <= room_of_row(engine, engine.size)
    given = bytes_sent(engine, nbytes, dtype) if collective == "scatter" else nbytes
    return 0 < given <= room_of_row(engine, 1)


def _measured(selector: PathSelector, nbytes: int, kind: str) -> str:
    """One line for each measured path, the fastest first."""
    paths, measured = selector.candidates(nbytes), selector.seconds(nbytes)
    untried = [path for path in paths if path not in measured]
    if not measured:
        return f"not yet measured{kind}: the next calls try {', '.join(untried)}"
    ranked = sorted(measured, key=lambda path: measured[path])
    lines = [f"  {path:<22}{measured[path] * 1e6:12.1f} µs measured" for path in ranked]
    lines += [f"  {path:<22}not yet measured" for path in untried]
    return "\n".join([f"{ranked[0]} runs: least time in the calls of about that size", *lines])
