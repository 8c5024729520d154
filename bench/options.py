"""The command line, parsed before MPI starts, so that every rank finds the same errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bench.cases import CASES
from bench.cases.base import AUTO, Case
from bench.measure import Settings
from bench.peers import PEERS
from bench.problem import OPS, DType, Problem
from bench.sizes import parse_size, parse_sizes, sweep
from collectives import algorithms
from collectives.launching.launcher import find_launcher
from collectives.schedules.paths import FORCED, NATIVE

ALL = "all"
_EPILOG = """\
Time is the median over the repeats of the slowest rank's time; algbw = size / time, busbw = algbw ×
the part of the size that the busiest link must carry; ratio is the median of the repeats' own
ratios, each the peer's time / ours, so that above 1 ours is faster: it may differ from the quotient
of the two medians. Size is the whole buffer: for all_gather, gather, scatter and reduce_scatter
that of all ranks' blocks together, for all_to_all what one rank sends. Sizes are rounded up to
whole blocks. The calls of a repeat follow one another without a barrier, so that those of a rooted
collective may overlap; --calls 1 prevents this. With --asynchronous mpi4py's calls are its
nonblocking ones, each with its wait, too. Besides the ratio to MPI of the all_reduce that is
selected by default, model is the ratio that memory traffic predicts, from MPI's ring with one copy
to its ring with two; "% of stream", from 64 MiB on, is the part of the bandwidth measured by
--stream that this traffic uses: loads and stores that hit the caches count, so that it may exceed
100. MPI4PY_RC_THREAD_LEVEL=single in the environment measures MPI without its thread locks. Exit
status: 0, or 1 if a result was wrong, or 2 if the measurement is not possible."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked options; exits with status 2 if they are invalid."""
    parser = _parser()
    options = parser.parse_args(arguments)
    case = CASES[options.collective]
    try:
        _check(options, case)
    except ValueError as error:
        parser.error(str(error))
    return options


class Parser(argparse.ArgumentParser):
    """Prints on one of the launcher's ranks only; MPI is not running yet."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        if not _is_first():
            sys.exit(2)
        super().error(message)

    def print_help(self, file: Any = None) -> None:
        """All options."""
        if _is_first():
            super().print_help(file)


def _is_first() -> bool:
    return find_launcher(os.environ).rank == 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m bench",
        description="Time a collective over a range of sizes, like nccl-tests.",
        epilog=_EPILOG,
    )
    parser.add_argument("collective", choices=CASES, metavar="collective", help=", ".join(CASES))
    what = parser.add_argument_group("what")
    add_problem(what)
    what.add_argument(
        "--algorithm",
        default=AUTO,
        metavar="NAMES",
        help="comma list; auto (the default) is the default selection, all is every schedule and"
        " native",
    )
    _add_method(parser.add_argument_group("how"))
    _add_output(parser.add_argument_group("output, beside the table"))
    return parser


def add_problem(group: argparse._ActionsContainer) -> None:
    """The sizes, the dtype, the op and the root."""
    add = group.add_argument
    add("--min-bytes", type=parse_size, default=8, metavar="SIZE", help="default: 8")
    add("--max-bytes", type=parse_size, default=64 << 20, metavar="SIZE", help="default: 64M")
    add("--step-factor", type=int, default=2, metavar="N", help="between sizes (default: 2)")
    add("--sizes", type=parse_sizes, metavar="SIZES", help="these sizes instead: 8,64K,1M")
    add("--tensors", type=int, default=1000, help="of all_reduce_many (default: 1000)")
    add("--tensor-bytes", type=parse_size, metavar="SIZE", help="of each: one size instead")
    add("--dtype", type=parse_dtype, default=np.dtype("float32"), help="default: float32")
    add("--op", choices=OPS, default="sum", help=f"{', '.join(OPS)} (default: sum)", metavar="OP")
    add("--root", type=int, default=0, metavar="RANK", help="default: 0")


def _add_method(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--repeats", type=int, default=Settings.repeats, help="default: %(default)s")
    add("--warmup", type=int, default=Settings.warmup, help="calls before (default: %(default)s)")
    add("--calls", type=int, help="in a repeat (default: as many as move 1M, at most 200)")
    add("--rotate", type=int, default=1, metavar="N", help="buffer sets to cycle (default: 1)")
    add("--asynchronous", action="store_true", help="start each call, then wait for it")
    add("--registered", action="store_true", help="all buffers from Communicator.empty")
    add("--stream", action="store_true", help="measure the memory's bandwidth too; takes a second")
    add("--peer", choices=PEERS, help="compare with, call by call: %(choices)s", metavar="NAME")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", help="everything, with all statistics")
    add("--markdown", type=Path, metavar="FILE", help="header and table")
    add("--plot", type=Path, metavar="FILE.png", help="busbw over size (or .svg, .pdf)")


def parse_dtype(text: str) -> DType:
    """The dtype of that name."""
    problem = argparse.ArgumentTypeError(f"{text!r} is not a dtype of numbers such as float32")
    try:
        dtype = np.dtype(text)
    except TypeError:
        raise problem from None
    # Those of ml_dtypes, such as bfloat16, have kinds of their own.
    if dtype.kind not in "biufc" and dtype.type.__module__ != "ml_dtypes":
        raise problem
    return dtype.newbyteorder("=")


_PICTURES = ".png", ".svg", ".pdf"


def _check(options: argparse.Namespace, case: Case) -> None:
    """Raise ValueError for an invalid value; add the derived options."""
    _at_least(1, "rotate", options.rotate)
    check_sizes(options)
    if options.plot and options.plot.suffix not in _PICTURES:
        raise ValueError(f"--plot {options.plot}: must end in {', '.join(_PICTURES)}")
    if options.plot and not case.has_bytes:
        raise ValueError(f"--plot shows bandwidth, and {case.name} moves no bytes")
    if options.asynchronous and case.counterpart != case.name:
        raise ValueError(f"--asynchronous: {case.name} has no such form")
    options.algorithms = _algorithms(case, options.algorithm)
    names = [field.name for field in fields(Settings)]
    options.settings = Settings(**{name: getattr(options, name) for name in names})


def check_sizes(options: argparse.Namespace) -> None:
    """Raise ValueError for invalid sizes or counts."""
    for name in ("repeats", "tensors", "min_bytes"):
        _at_least(1, name, getattr(options, name))
    for name in ("warmup", "rotate", "root"):
        _at_least(0, name, getattr(options, name))
    _at_least(2, "step_factor", options.step_factor)
    for name in ("calls", "tensor_bytes"):
        if getattr(options, name) is not None:
            _at_least(1, name, getattr(options, name))
    if options.max_bytes < options.min_bytes:
        raise ValueError("--max-bytes is less than --min-bytes")
    if options.tensor_bytes is not None:
        _check_tensor_bytes(options)


def _check_tensor_bytes(options: argparse.Namespace) -> None:
    named = f"--tensor-bytes {options.tensor_bytes}"
    if not options.collective.endswith("all_reduce_many"):
        raise ValueError(f"{named} is of all_reduce_many, and not of {options.collective}")
    if options.tensor_bytes % (size := options.dtype.itemsize):
        raise ValueError(f"{named}: {options.dtype} has {size} bytes, of which it is no multiple")


def _at_least(smallest: int, name: str, value: int) -> None:
    if value < smallest:
        raise ValueError(f"--{name.replace('_', '-')} is {value}: must be at least {smallest}")


def _algorithms(case: Case, text: str) -> list[str]:
    if not case.takes_algorithm:
        if text not in (AUTO, ALL):
            raise ValueError(f"--algorithm: {case.name} chooses by itself; only auto")
        return [AUTO]
    known = [*algorithms.names(case.name), *FORCED]
    if text == ALL:
        # The other paths need memory that all ranks share.
        return [*algorithms.names(case.name), NATIVE]
    chosen = text.split(",")
    for name in chosen:
        if name not in (AUTO, *known):
            raise ValueError(f"--algorithm: {case.name} has {', '.join(known)}, not {name!r}")
    return chosen


def problems(options: argparse.Namespace, ranks: int) -> list[Problem]:
    """The sizes to measure on that many ranks, without duplicates."""
    case = CASES[options.collective]
    unit = case.unit(ranks, options.tensors)
    counts = [_rounded_up(size, options.dtype.itemsize * unit) * unit for size in _sizes(options)]
    return [
        Problem(ranks, count, options.dtype, options.op, options.root, options.tensors)
        for count in dict.fromkeys(counts)
    ]


def _sizes(options: argparse.Namespace) -> tuple[int, ...]:
    if not CASES[options.collective].has_bytes:
        return (1,)
    if options.tensor_bytes:
        return (options.tensors * options.tensor_bytes,)
    sizes: tuple[int, ...] = options.sizes or sweep(
        options.min_bytes, options.max_bytes, options.step_factor
    )
    return sizes


def _rounded_up(nbytes: int, unit: int) -> int:
    return max(1, -(-nbytes // unit))
