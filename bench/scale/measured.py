"""Predictions held against measurements: one rank on each of some network namespaces.

On each number of hosts `tune()` runs first and saves the parameters that it fits, then
`python -m bench` measures every algorithm and the automatic choice with them. A prediction is the
cost model's expected time with these parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.cases.base import AUTO
from bench.hosts.namespaces import hosts, launch_line, shape
from bench.hosts.table import usable_mpirun
from bench.reports.columns import machine_lines
from bench.run import CAN_NOT_MEASURE
from bench.sizes import shown
from collectives import algorithms
from collectives.execution.cost_model import CostParameters, Layout, choose, expected
from collectives.execution.parameters_file import CACHE_VARIABLE
from collectives.schedules.paths import NATIVE

_TUNE = """
import collectives

comm = collectives.world(deadline=300)
report = comm.tune()
if comm.rank == 0:
    print(report)
"""
_LEAST_PREDICTED = 64 << 10
_HEADER = """\
| hosts | size | algorithm | measured (µs) | predicted (µs) | predicted / measured |
|---:|---:|---|---:|---:|---:|"""


def measure(options: argparse.Namespace) -> int:
    """Print a table; 2 where hosts can't be simulated."""
    mpirun = usable_mpirun()
    if mpirun is None:
        return CAN_NOT_MEASURE
    for number, count in enumerate(options.hosts):
        layout, costs, header, rows = _run(mpirun, count, options)
        if not number:
            command = " ".join(["python -m bench.scale", *sys.argv[1:]])
            print(f"{'; '.join(machine_lines(header))}.\n\n`{command}`: medians.\n")
        print(_HEADER)
        print("\n".join(_lines(layout, options.collective, costs, rows)), flush=True)
    return 0


def _run(
    mpirun: str, count: int, options: argparse.Namespace
) -> tuple[Layout, CostParameters, dict[str, Any], list[dict[str, Any]]]:
    """The layout, whose hosts share cores; its fitted parameters; what `python -m bench` reports.

    That is the header and the rows.
    """
    with hosts(count) as (addresses, agent), tempfile.TemporaryDirectory() as folder:
        shape(agent, addresses, options.rate)
        line, environment = launch_line(mpirun, agent, addresses, [1] * count)
        environment = {**os.environ, **environment, CACHE_VARIABLE: folder}
        report = Path(folder) / "report.json"
        sizes = ",".join(map(str, options.sizes))
        names = ",".join([*algorithms.names(options.collective), NATIVE, AUTO])
        bench = ["-m", "bench", options.collective, "--algorithm", names, "--sizes", sizes]
        bench += ["--repeats", str(options.repeats), "--json", str(report)]
        for program in (["-c", _TUNE], bench):
            subprocess.run(
                [*line, sys.executable, *program], env=environment, check=True, stdout=sys.stderr
            )
        (fitted,) = Path(folder).glob("figures-*.json")
        saved = json.loads(fitted.read_text(encoding="utf-8"))
        reported = json.loads(report.read_text(encoding="utf-8"))
        key = saved["key"]
        layout = Layout(tuple(key["local_sizes"]), key["crowding"])
        costs = CostParameters(**saved["figures"])
        return layout, costs, reported["header"], reported["rows"]


def _lines(
    layout: Layout, collective: str, costs: CostParameters, rows: list[dict[str, Any]]
) -> Iterator[str]:
    """One for each size and algorithm, and then how the predictions and the choice did."""
    count = len(layout.local_sizes)
    ratios: list[float] = []
    losses: list[float] = []
    for nbytes in dict.fromkeys(row["nbytes"] for row in rows):
        taken = {row["algorithm"]: _seconds(row) for row in rows if row["nbytes"] == nbytes}
        chosen = choose(collective, nbytes, layout, (NATIVE,), costs).algorithm
        for name, seconds in taken.items():
            path = chosen if name == AUTO else name
            predicted = expected(collective, path, nbytes, layout, costs)
            ratio = predicted / seconds
            shown_name = f"{AUTO}: {chosen}" if name == AUTO else name
            times = f"{seconds * 1e6:.1f} | {predicted * 1e6:.1f} | {ratio:.2f}"
            yield f"| {count} | {shown(nbytes)} | {shown_name} | {times} |"
            if nbytes >= _LEAST_PREDICTED:
                ratios.append(ratio)
        losses.append(taken[AUTO] / min(taken.values()))
    if ratios:
        yield (
            f"\n{count} hosts: predicted / measured {min(ratios):.2f} to {max(ratios):.2f} from"
            f" {shown(_LEAST_PREDICTED)} on; the automatic choice takes up to {max(losses):.2f} of"
            " the fastest's time\n"
        )


def _seconds(row: dict[str, Any]) -> float:
    place = row["out_of_place"] or row["in_place"]
    median: float = place["seconds"]["median"]
    return median
