"""A table with rows for every layout of hosts and every link."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.hosts.namespaces import find_mpirun, why_not
from bench.run import CAN_NOT_MEASURE

Measure = Callable[[str, int, int, str, argparse.Namespace], dict[str, Any]]
"""From the path of mpirun, the hosts, the ranks on each, the rate and the options: a report."""


def add_options(parser: argparse.ArgumentParser, *, rates: str, repeats: int) -> None:
    """Those of every table, with these defaults."""
    parser.add_argument("--layouts", default="2x1,2x2", help="hosts x ranks (default: 2x1,2x2)")
    parser.add_argument("--rates", default=rates, help=f"default: {rates}")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"default: {repeats}")
    parser.add_argument("--markdown", type=Path, metavar="FILE")


def usable_mpirun() -> str | None:
    """The path of mpirun. None where hosts can't be simulated; prints why."""
    mpirun = find_mpirun()
    problem = why_not() or (None if mpirun else "no mpirun was found")
    if problem is not None:
        print(f"hosts can't be simulated here: {problem}", file=sys.stderr)
        return None
    return mpirun


def print_table(
    options: argparse.Namespace,
    measure: Measure,
    head: Callable[[dict[str, Any]], Iterable[str]],
    rows: Callable[[dict[str, Any], str, str], Iterable[str]],
) -> int:
    """Print the head of the first report, and the rows of each; 2 if hosts aren't possible here."""
    mpirun = usable_mpirun()
    if mpirun is None:
        return CAN_NOT_MEASURE
    lines: list[str] = []
    for layout in options.layouts.split(","):
        count, _, ranks = layout.partition("x")
        for rate in options.rates.split(","):
            report = measure(mpirun, int(count), int(ranks), rate, options)
            found = list(rows(report, f"{count} × {ranks}", rate))
            found = found if lines else [*head(report), *found]
            print("\n".join(found), flush=True)
            lines += found
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0
