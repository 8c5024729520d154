"""The command line of `python -m bench.gpu`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cases import CASES
from bench.measure import Settings
from bench.options import ALL, Parser, add_problem, check_sizes
from collectives.lifecycle.setup import BACKENDS

BARS = "bars"
# A persistent call on a GPU is made like an ordinary one: it would be measured twice.
COLLECTIVES = tuple(
    name for name, case in CASES.items() if case.has_bytes and case.counterpart == name
)
_EPILOG = """\
Time is the median over the repeats of the slowest rank's, by the GPU's events around a batch of
calls; algbw, busbw and size are those of `python -m bench`. ratio is the median of the
repeats' own ratios, each the time of the bare NCCL call, on the same communicator and in the same
memory, / ours: above 1 ours is faster. graph is a call's
part of a batch that is replayed as one CUDA graph. Exit status: 0, or 1 if a result was wrong, or 2
if the measurement is not possible."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked options; exits with status 2 if they are invalid."""
    parser = Parser(
        prog="python -m bench.gpu",
        description="Time collectives on arrays in GPU memory, compared with bare NCCL.",
        epilog=_EPILOG,
    )
    _add_problem(parser)
    _add_method(parser)
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    options.given = [each for each in given if each != options.collective]
    try:
        check_sizes(options)
    except ValueError as error:
        parser.error(str(error))
    names = list(COLLECTIVES) if options.collective == ALL else [options.collective]
    options.collectives = [name for name in names if name != BARS]
    options.bars = options.collective in (ALL, BARS)
    options.settings = Settings(options.repeats, options.warmup, options.rotate, options.calls)
    return options


def _add_problem(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = (ALL, BARS, *COLLECTIVES)
    help = f"{', '.join(names)} (default: all); bars are the measurements with a required value"
    add("collective", nargs="?", choices=names, default=ALL, metavar="collective", help=help)
    add_problem(parser)


def _add_method(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="nccl", help="default: nccl")
    add("--repeats", type=int, default=Settings.repeats, help="default: %(default)s")
    add("--warmup", type=int, default=Settings.warmup, help="calls before (default: %(default)s)")
    add("--calls", type=int, help="in a repeat (default: one for each buffer set, at least 20)")
    help = "buffer sets to cycle (default: above twice the GPU's cache, at most 256; lists: 4)"
    add("--rotate", type=int, default=0, metavar="N", help=help)
    add("--json", type=Path, metavar="FILE", help="every row, with all statistics")
    add("--markdown", type=Path, metavar="FILE", help="headers and tables")
