"""A run under mpirun: tables of compiled calls and training steps, as Markdown. Rank 0 prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from bench.reports.training import add_output, check_output, finish, head
from bench.sizes import parse_count, parse_sizes, shown
from bench.timing import batch_of, medians
from bench.training_table import HEAD, rows

_STEPS = 10
_SIZES = [8, 1 << 19, 1 << 22]
_CALLS_IN_A_ROW = 10
"""At least: a first call finds in the caches what the peer before it left there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 without JAX."""
    options = _parser().parse_args(arguments)
    if find_spec("jax") is None:
        print("bench.jax: jax isn't installed: `pip install jax`", file=sys.stderr)
        return 2
    _measure(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bench.jax", description=__doc__)
    parser.add_argument("--sizes", type=parse_sizes, default=_SIZES, help="bytes, such as 8,4M")
    parser.add_argument(
        "--batch", type=parse_count, default=16, help="images of each rank (default: 16)"
    )
    parser.add_argument("--only", choices=("calls", "training"), help="one table")
    text = "leave out psum, whose runtime (jax.distributed) slows down all programs of its process"
    parser.add_argument("--no-psum", action="store_true", help=text)
    parser.add_argument(
        "--repeats", type=parse_count, default=15, help="of each call (default: 15)"
    )
    add_output(parser)
    return parser


def _measure(options: argparse.Namespace) -> None:
    import jax
    from mpi4py import MPI

    from bench.jax import operations

    world = MPI.COMM_WORLD.Dup()
    check_output(world, options)
    compared = options.only != "training" and not options.no_psum
    failure = operations.start_distributed() if compared else ""
    about = f"{jax.__version__}, {options.batch} images of each rank per step"
    lines = head("bench.jax", world, jax=about)
    if failure:
        lines.append(f"- psum: not measured: {failure.splitlines()[0]}")
    if options.only != "training":
        lines += _calls(options, world)
    if options.only != "calls":
        lines += _training(options, world)
    finish("JAX", lines, world, options.output)


def _calls(options: argparse.Namespace, world: Any) -> Iterator[str]:
    """Donated arrays; each peer's time is divided by ours."""
    from bench.jax.operations import call_of, ways

    every = ways(world)
    if options.no_psum:
        del every["psum"]
    for name, way in every.items():
        if isinstance(way, str):
            yield f"- {name}: not measured: {way.splitlines()[0]}"
    measured = {name: way for name, way in every.items() if not isinstance(way, str)}
    yield from ("", "| jitted all_reduce | bytes | µs | time ÷ ours |", "|---|---:|---:|---:|")
    for nbytes in [-(-size // 4) * 4 for size in options.sizes]:  # of float32
        calls = [call_of(name, way, nbytes, world) for name, way in measured.items()]
        batch = max(_CALLS_IN_A_ROW, batch_of(nbytes))
        found = medians(calls, world, batch=batch, repeats=options.repeats)
        for name, seconds in zip(measured, found, strict=True):
            ratio = seconds / found[0]
            yield f"| {name} | {shown(nbytes)} | {1e6 * seconds:.1f} | {ratio:.2f} |"


def _training(options: argparse.Namespace, world: Any) -> Iterator[str]:
    from bench.jax.training import steps

    yield from ("", HEAD)
    yield from rows(partial(steps, options.batch), world, batch=_STEPS, repeats=options.repeats)
