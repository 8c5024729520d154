"""A table with rows for every layout of hosts and every link."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

from bench.hosts.namespaces import find_mpirun, why_not
from bench.run import CAN_NOT_MEASURE

Measure = Callable[[str, int, int, str, argparse.Namespace], dict[str, Any]]
"""From the path of mpirun, the hosts, the ranks on each, the rate and the options: a report."""


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
    for count, ranks in options.layouts:
        for rate in options.rates:
            report = measure(mpirun, count, ranks, rate, options)
            found = list(rows(report, f"{count} × {ranks}", rate))
            found = found if lines else [*head(report), *found]
            print("\n".join(found), flush=True)
            lines += found
            if options.markdown is not None:  # what a failure of the next one leaves
                options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0
