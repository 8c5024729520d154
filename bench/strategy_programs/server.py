"""Pulls and pushes of a parameter server, compared with a copy of the same number of bytes.

One worker and one server on the same node. A pull copies the variable's value from the server's
memory into an existing array of the worker; the copy, in alternation, copies between two such
arrays. A push is an `assign_add`; it is complete when it has been applied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import collectives
import strategies
from bench.strategy_programs.roles import resolver_of
from bench.strategy_programs.rows import print_rows
from bench.timing import wall_seconds

SIZES_MB = (1, 10, 100)
REPEATS, WARM_UP = 40, 3


def measure(strategy: strategies.Strategy, megabytes: int) -> dict[str, Any]:
    """A row for one variable of that size."""
    elements = megabytes * 1_000_000 // 4
    with strategy.scope():
        variable = strategies.Variable(np.zeros(elements, np.float32))
    ones = np.ones(elements, np.float32)
    source, warm = ones.copy(), np.zeros(elements, np.float32)

    def push() -> None:
        variable.assign_add(ones)
        variable[0]  # pulls the whole variable, and so waits for the push

    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: np.copyto(warm, source),
        "pull": lambda: variable.local,
        "push and pull": push,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-WARM_UP, REPEATS):
        for name, call in calls.items():
            taken = wall_seconds(call)
            if repeat >= 0:
                seconds[name].append(taken)
    if not (variable.numpy() == REPEATS + WARM_UP).all():
        raise RuntimeError("the variable does not have the value that was pushed")
    ratios = np.array(seconds["pull"]) / np.array(seconds["copy"])
    pull = float(np.median(seconds["pull"]))
    alone = float(np.median(np.array(seconds["push and pull"]) - np.array(seconds["pull"])))
    return {
        "MB": megabytes,
        "copy GB/s": round(megabytes / 1e3 / float(np.median(seconds["copy"])), 2),
        "pulls/s": round(1 / pull, 1),
        "pull GB/s": round(megabytes / 1e3 / pull, 2),
        "pull over copy": round(float(np.median(ratios)), 2),
        "pushes/s": round(1 / alone, 1) if alone > 0 else "-",
        "push GB/s": round(megabytes / 1e3 / alone, 2) if alone > 0 else "-",
    }


def main() -> int:
    """Serve, or measure and print a row for each size."""
    comm = collectives.world()
    resolver = resolver_of(comm, {"worker": 1, "ps": 1})
    strategy = strategies.ParameterServerStrategy(resolver, communicator=comm)
    if resolver.task_type == "ps":
        strategy.serve()
        return 0
    rows = [measure(strategy, size) for size in SIZES_MB]
    print_rows("one worker, one server, float32, medians", rows)
    strategy.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
