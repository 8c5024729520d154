"""Effect of a slow worker on the others: rates of steps under ParameterServerStrategy.

Three workers and a server. A step pulls the variables, computes, and pushes gradients. Computing is
a sleep, as on a separate device, so that the measurement shows waiting and not the sharing of
cores. Blocks in which one worker takes ten times as long per step alternate with blocks in which
all take the same time.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import collectives
import strategies
from bench.strategy_programs.perceptron import Perceptron
from bench.strategy_programs.roles import resolver_of
from bench.strategy_programs.rows import print_rows

WORKERS, BLOCKS, BLOCK_SECONDS = 3, 8, 2.0
COMPUTE_SECONDS, SLOWER = 0.02, 10
WIDTHS = (64, 128, 10)


def rate_of(strategy: Any, model: Perceptron, optimizer: Any, seconds: float) -> float:
    """Steps per second in a block, with a computing time of `seconds` per step."""

    def step() -> None:
        gradients = [np.full_like(variable.local, 1e-9) for variable in model.variables]
        time.sleep(seconds)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < BLOCK_SECONDS:
        strategy.run(step)
        steps += 1
    return steps / (time.perf_counter() - start)


def main() -> int:
    """Serve, or work; the first worker prints the rows."""
    comm = collectives.world()
    resolver = resolver_of(comm, {"worker": WORKERS, "ps": 1})
    strategy = strategies.ParameterServerStrategy(resolver, communicator=comm)
    working = comm.split(0 if resolver.task_type == "worker" else None)
    if working is None:
        strategy.serve()
        return 0
    with strategy.scope():
        model = Perceptron(WIDTHS)
        optimizer = strategies.optimizers.SGD(0.1)
    slow = working.rank == WORKERS - 1
    rates: dict[str, list[list[float]]] = {"all equal": [], "one slow": []}
    for _ in range(BLOCKS):
        for kind, found in rates.items():
            times = SLOWER if slow and kind == "one slow" else 1
            working.barrier()
            own = rate_of(strategy, model, optimizer, COMPUTE_SECONDS * times)
            found.append(working.all_gather(np.array([own])).tolist())
    strategy.shutdown()
    if working.rank == 0:
        print_rows(_about(), _rows(rates))
    return 0


def _about() -> str:
    return (
        f"{WORKERS} workers, one server, a step of {COMPUTE_SECONDS * 1e3:g} ms and its messages,"
        f" {SLOWER} times as long on the last worker where it is slow"
    )


def _rows(rates: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    medians = {kind: np.median(np.array(found), axis=0) for kind, found in rates.items()}
    equal, slowed = np.array(rates["all equal"]), np.array(rates["one slow"])
    others = np.median(slowed[:, :-1].sum(axis=1) / equal[:, :-1].sum(axis=1))
    rows = [
        {"workers": kind, **{f"worker {i}, steps/s": round(r, 1) for i, r in enumerate(found)}}
        for kind, found in medians.items()
    ]
    rows[1]["the others' rate over that of equals"] = round(float(others), 3)
    return rows


if __name__ == "__main__":
    sys.exit(main())
