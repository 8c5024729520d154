"""A run under mpirun: a table of the ways to train the same network. Rank 0 prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from bench.in_step import IN_STEP, with_barrier
from bench.reports.training import add_output, check_output, finish, head
from bench.sizes import parse_count
from bench.training_table import HEAD, Make, rows

_APART = "apart"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 without Keras or its backend."""
    options = _parser().parse_args(arguments)
    for module in ("keras", options.backend):
        if find_spec(module) is None:
            print(f"bench.keras: {module} isn't installed", file=sys.stderr)
            return 2
    os.environ["KERAS_BACKEND"] = options.backend
    _measure(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bench.keras", description=__doc__)
    parser.add_argument(
        "--backend", choices=("torch", "jax", "tensorflow"), default="torch", help="of Keras"
    )
    parser.add_argument(
        "--batch", type=parse_count, default=16, help="images of each rank (default: 16)"
    )
    parser.add_argument("--steps", type=parse_count, default=60, help="of an epoch (default: 60)")
    parser.add_argument(
        "--repeats", type=parse_count, default=9, help="epochs of each (default: 9)"
    )
    add_output(parser)
    return parser


def _measure(options: argparse.Namespace) -> None:
    import keras
    from mpi4py import MPI

    from bench.keras import training

    world = MPI.COMM_WORLD.Dup()
    check_output(world, options)
    tables: dict[str, Make] = {}
    size = options.batch, options.steps
    if options.backend == "tensorflow":
        tables["A custom loop in a tf.function"] = _loops(world, *size)
    if options.backend == "torch":
        import torch

        torch.set_num_threads(1)
    tables["fit"] = lambda: {
        _APART: training.apart(*size),
        IN_STEP: training.in_step(*size),
        "compile in the scope": training.together(*size),
    }
    about = f"{keras.__version__}, {options.batch} images of each rank per step"
    lines = head("bench.keras", world, keras=about)
    for title, make in tables.items():
        lines += ["", f"## {title}", "", HEAD]
        lines += rows(make, world, batch=1, repeats=options.repeats, steps=options.steps)
    finish(f"Keras on {options.backend}", lines, world, options.output)


def _loops(world: Any, batch: int, steps: int) -> Make:
    """Custom loops. TensorFlow's own strategy is made before anything else uses TensorFlow."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    from bench.keras import loops
    from strategies.tensorflow import MultiWorkerMirroredStrategy

    own = loops.tensorflows_own(world)
    ways = {
        "strategies.tensorflow": MultiWorkerMirroredStrategy(),
        "TensorFlow's own": own,
    }
    alone = tf.distribute.get_strategy()
    return lambda: {
        _APART: loops.epoch_of(alone, batch, steps),
        IN_STEP: loops.epoch_of(alone, batch, steps, around=with_barrier),
        **{name: loops.epoch_of(strategy, batch, steps) for name, strategy in ways.items()},
    }
