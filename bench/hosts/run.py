"""Between hosts, beside mpi4py: `python -m bench.hosts --markdown FILE`.

The hosts are network namespaces of this machine, which need root; the links are shaped by a token
bucket. Each host has one core, which hosts share where there are fewer cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.cases import CASES
from bench.hosts.namespaces import congestion_control, hosts, launch_line, shape
from bench.hosts.options import UNSHAPED, add_options, parse_names
from bench.hosts.table import print_table
from bench.reports.columns import machine_lines, settings_line
from bench.sizes import parse_sizes

_SIZES = "8,4K,64K,1M,16M"
_HEADER = """\
| collective | hosts × ranks | link | size (B) | ours (µs) | mpi4py (µs) | ratio | GB/s |
|---|---|---|---:|---:|---:|---:|---:|"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every layout over every link; 2 where that isn't possible here."""
    command = sys.argv[1:] if arguments is None else arguments
    return print_table(_options(arguments), _measure, partial(_head, command), _rows)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    add_options(parser, rates=f"{UNSHAPED},1gbit", repeats=20, unshaped=True)
    add = parser.add_argument
    add("--collectives", type=parse_names(CASES), default="all_reduce", help="default: all_reduce")
    add("--sizes", type=parse_sizes, default=_SIZES, help=f"default: {_SIZES}")
    return parser.parse_args(arguments)


def _measure(
    mpirun: str, count: int, ranks: int, rate: str, options: argparse.Namespace
) -> dict[str, Any]:
    """The reports of `python -m bench` on so many hosts, joined."""
    with hosts(count) as (addresses, agent), tempfile.TemporaryDirectory() as folder:
        if rate != UNSHAPED:
            shape(agent, addresses, rate)
        path = Path(folder) / "report.json"
        launch, environment = launch_line(mpirun, agent, addresses, [ranks] * count)
        control = congestion_control(agent, addresses[0])
        joined: dict[str, Any] = {"rows": [], "congestion_control": control}
        sizes = ",".join(map(str, options.sizes))
        for collective in options.collectives:
            line = [*launch, sys.executable, "-m", "bench", collective, "--sizes", sizes]
            line += ["--repeats", str(options.repeats), "--peer", "mpi4py", "--json", str(path)]
            variables = os.environ | environment
            # Its table says which results are wrong, if it fails.
            subprocess.run(line, env=variables, check=True, stdout=sys.stderr)
            report = json.loads(path.read_text(encoding="utf-8"))
            joined["header"] = report["header"]
            joined["rows"] += [row | {"collective": collective} for row in report["rows"]]
        return joined


def _head(command: Sequence[str], report: dict[str, Any]) -> list[str]:
    """What was measured, and on what."""
    header, line = report["header"], " ".join(["python -m bench.hosts", *command])
    tcp = f"TCP's congestion control: {report['congestion_control']}"
    about = "out of place unless a row says in place; times are medians, ratio is the median of the"
    about += " repeats' own ratios, each mpi4py's time / ours"
    text = f"`{line}`: {about}. {settings_line(header)}, {tcp}."
    return ["; ".join(machine_lines(header)) + ".", "", text, "", *_HEADER.splitlines()]


def _rows(report: dict[str, Any], layout: str, rate: str) -> Iterator[str]:
    for row in report["rows"]:
        place, name = row["out_of_place"], row["collective"]
        if place is None:
            place, name = row["in_place"], f"{name}, in place"
        ours, peer = place["seconds"]["median"], place["peer"]["seconds"]["median"]
        nbytes, ratio = row["nbytes"], place["peer"]["ratio"]
        figures = f"{ours * 1e6:.1f} | {peer * 1e6:.1f} | {ratio:.2f} | {nbytes / ours / 1e9:.3f}"
        yield f"| {name} | {layout} | {rate} | {nbytes} | {figures} |"
