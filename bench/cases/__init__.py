"""Table of the collectives that can be measured. A new one needs a class and a line here."""

from __future__ import annotations

from bench.cases import movements, reductions
from bench.cases.base import Case

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        reductions.AllReduce(),
        reductions.AllReduceMany(),
        reductions.PersistentAllReduceMany(),
        reductions.Reduce(),
        reductions.ReduceScatter(),
        reductions.Scan(),
        reductions.Exscan(),
        movements.Broadcast(),
        movements.AllGather(),
        movements.Gather(),
        movements.Scatter(),
        movements.AllToAll(),
        movements.Barrier(),
    )
}
