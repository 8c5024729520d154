"""Cost of a synchronous step, compared with the same step of one process at equal batch per rank.

Blocks alternate: rank 0 steps alone while the others sleep; all ranks step at the same time without
communication, which shows their mutual disturbance; all ranks step synchronously, with a copy of
every variable for each rank, or with one for all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import collectives
import strategies
from bench.options import Parser
from bench.strategy_programs.perceptron import WIDTHS, Perceptron
from bench.strategy_programs.rows import print_rows

STEPS, BLOCKS, WARM_UP = 10, 25, 3


def make_step(strategy: strategies.Strategy, batch: int) -> Callable[[], Any]:
    """One training step under the strategy; collective if the strategy is."""
    generator = np.random.default_rng(strategy.communicator.rank)
    images = generator.normal(size=(batch, WIDTHS[0])).astype(np.float32)
    labels = generator.integers(0, WIDTHS[-1], batch)
    with strategy.scope():
        model = Perceptron()
        optimizer = strategies.optimizers.SGD(0.001, momentum=0.9)
    views = optimizer.gradient_views(model.variables)

    def step() -> None:
        model.gradients(images, labels, views)
        optimizer.apply_gradients(zip(views, model.variables, strict=True))

    return lambda: strategy.run(step)


def seconds_of(step: Callable[[], Any]) -> float:
    """Seconds per step in a block."""
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def measure(comm: collectives.Communicator, batch: int) -> dict[str, list[float]]:
    """The slowest rank's seconds per step in each block."""
    lone = make_step(strategies.get_strategy(), batch)
    mirrored = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    central = strategies.CentralStorageStrategy(communicator=comm)
    kinds = {
        "alone": lone,
        "each for itself": lone,
        "in step": make_step(mirrored, batch),
        "in step, central storage": make_step(central, batch),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for block in range(-WARM_UP, BLOCKS):
        for kind, step in kinds.items():
            comm.barrier()
            idle = kind == "alone" and comm.rank > 0
            taken = np.array([0.0 if idle else seconds_of(step)])
            slowest = float(comm.all_reduce(taken, "max")[0])
            if block >= 0:
                seconds[kind].append(slowest)
    return seconds


def main() -> int:
    """Print a row for each kind of block."""
    options = _parse()
    comm = collectives.world()
    seconds = measure(comm, options.batch)
    alone = np.array(seconds["alone"])
    rows = [
        {
            "batch per rank": options.batch,
            "step": kind,
            "ms (median)": round(float(np.median(times)) * 1e3, 3),
            "ms (fastest)": round(min(times) * 1e3, 3),
            "over alone (median of ratios)": round(float(np.median(np.array(times) / alone)), 3),
        }
        for kind, times in seconds.items()
    ]
    about = f"{Perceptron().parameters:,} parameters, {comm.size} ranks, the slowest rank's time"
    if comm.rank == 0:
        print_rows(about, rows)
    return 0


def _parse() -> argparse.Namespace:
    parser = Parser(prog="python -m bench.strategy_programs.step", description=__doc__)
    parser.add_argument("--batch", type=int, default=64, help="per rank; default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
