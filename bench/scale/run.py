"""Predictions up to 65,536 ranks: `python -m bench.scale --output DIR`.

Three networks of two levels are assumed (see `networks`). For each number of ranks and bytes it
prints the path that the library would choose, its time as the cost model expects it and as an
event-driven simulation of the schedule predicts it, and the simulated times of all paths.
Fractions of a byte are allowed where a buffer is shorter than its number of chunks.
`--measured` compares predictions with measurements between network namespaces instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TypeVar

from bench.hosts.options import parse_names, parse_rate
from bench.options import Parser
from bench.output_paths import output_folder
from bench.scale.networks import NETWORKS
from bench.scale.predictions import Crossing, Prediction, crossings, predict
from bench.scale.report import section, write
from bench.sizes import parse_count, parse_sizes
from collectives import algorithms
from collectives.schedules.spec import SPECS

_SIZES = "8,256,4K,64K,1M,16M,256M"
_MEASURED_SIZES = "4K,64K,256K,1M,4M,16M"
_RANKS = ",".join(str(1 << exponent) for exponent in range(1, 17))
_T = TypeVar("_T")


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 where the measurement isn't possible."""
    options = _options(arguments)
    if options.measured:
        from bench.scale.measured import measure

        return measure(options)
    command = " ".join(
        ["python -m bench.scale", *(sys.argv[1:] if arguments is None else arguments)]
    )
    predictions: list[Prediction] = []
    changes: list[Crossing] = []
    jobs = [(name, ranks) for name in options.networks for ranks in options.ranks]
    for name, ranks in _with_progress(jobs):
        network = NETWORKS[name]
        found = [predict(network, options.collective, ranks, size) for size in options.sizes]
        predictions += found
        changes += crossings(network, found)
    for name in options.networks:
        print("\n".join(["", name, "", *section(name, predictions, changes)]))
    if options.output:
        write(options.output, command, predictions, changes)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m bench.scale", description=__doc__)
    add = parser.add_argument
    kinds = [name for name in SPECS if algorithms.names(name)]
    add("--collective", choices=kinds, default="all_reduce", help="default: all_reduce")
    add("--ranks", type=_numbers, default=_RANKS, help="default: powers of two up to 65536")
    add("--sizes", type=parse_sizes, help=f"default: {_SIZES}; {_MEASURED_SIZES} if measured")
    add(
        "--networks",
        type=parse_names(NETWORKS),
        default=list(NETWORKS),
        help=f"default: {', '.join(NETWORKS)}",
    )
    add("--output", type=output_folder, metavar="DIR", help="for scale-COLLECTIVE.md and .json")
    group = parser.add_argument_group("measured")
    group.add_argument("--measured", action="store_true", help="on network namespaces, as root")
    group.add_argument("--hosts", type=_at_least_two, default="2,4,8", help="default: 2,4,8")
    rate = "of each host's link (default: 1gbit)"
    group.add_argument("--rate", type=parse_rate, default="1gbit", help=rate)
    group.add_argument("--repeats", type=parse_count, default=10, help="default: 10")
    options = parser.parse_args(arguments)
    if options.sizes is None:
        options.sizes = parse_sizes(_MEASURED_SIZES if options.measured else _SIZES)
    options.sizes = sorted(set(options.sizes))
    if options.sizes[0] < 1:
        parser.error("--sizes: must be at least 1")
    if options.measured and options.output:
        parser.error("--output is of predictions, which --measured doesn't make")
    return options


def _at_least_two(text: str) -> list[int]:
    """Numbers in a comma list."""
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError(f"{min(numbers)}: must be at least 2")
    return numbers


def _numbers(text: str) -> list[int]:
    """Numbers of ranks, of which each fills its nodes on every network."""
    numbers = _at_least_two(text)
    for number in numbers:
        for network in NETWORKS.values():
            try:
                network.layout(number)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
    return numbers


def _with_progress(jobs: list[_T]) -> Iterable[_T]:
    """The jobs, with a bar on a terminal."""
    if not (sys.stderr.isatty() and find_spec("rich")):
        return jobs
    from rich.console import Console
    from rich.progress import track

    return track(jobs, "predicting", console=Console(stderr=True), transient=True)
