"""Between hosts, beside mpi4py: `python -m bench.hosts --markdown FILE`.

The hosts are network namespaces of this machine, which need root; the links are shaped by a token
bucket. All hosts share the machine's cores, so that more ranks than cores show the cost of waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.hosts.namespaces import find_mpirun, hosts, launch_line, shape, why_not
from bench.reports.columns import machine_lines, settings_line

_UNSHAPED = "unshaped"
_HEADER = """\
| hosts × ranks | link | size (B) | ours (µs) | mpi4py (µs) | ratio | GB/s |
|---|---|---:|---:|---:|---:|---:|"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every layout over every link; 2 where that isn't possible here."""
    options = _options(arguments)
    found = find_mpirun()
    problem = why_not() or (None if found else "no mpirun was found")
    if problem is not None or found is None:
        print(f"hosts can't be simulated here: {problem}", file=sys.stderr)
        return 2
    lines: list[str] = []
    for layout in options.layouts.split(","):
        count, _, ranks = layout.partition("x")
        for rate in options.rates.split(","):
            report = _measure(found, int(count), int(ranks), rate, options)
            if not lines:
                command = sys.argv[1:] if arguments is None else arguments
                lines = [*_head(report["header"], command), "", *_HEADER.splitlines()]
                print("\n".join(lines), flush=True)
            rows = list(_rows(report, f"{count} × {ranks}", rate))
            print("\n".join(rows), flush=True)
            lines += rows
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument("--layouts", default="2x1,2x2", help="hosts x ranks (default: 2x1,2x2)")
    parser.add_argument("--rates", default=f"{_UNSHAPED},1gbit", help="default: unshaped,1gbit")
    parser.add_argument("--collective", default="all_reduce", help="default: all_reduce")
    parser.add_argument("--sizes", default="8,4K,64K,1M,16M", help="default: 8,4K,64K,1M,16M")
    parser.add_argument("--repeats", type=int, default=20, help="default: 20")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def _measure(
    mpirun: str, count: int, ranks: int, rate: str, options: argparse.Namespace
) -> dict[str, Any]:
    """The report of `python -m bench` on so many hosts."""
    with hosts(count) as (addresses, agent), tempfile.TemporaryDirectory() as folder:
        if rate != _UNSHAPED:
            shape(agent, addresses, rate)
        report = Path(folder) / "report.json"
        line, environment = launch_line(mpirun, agent, addresses, [ranks] * count)
        line += [sys.executable, "-m", "bench", options.collective, "--sizes", options.sizes]
        line += ["--repeats", str(options.repeats), "--peer", "mpi4py", "--json", str(report)]
        subprocess.run(line, env=os.environ | environment, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def _head(header: dict[str, object], command: Sequence[str]) -> list[str]:
    """What was measured, and on what."""
    line = " ".join(["python -m bench.hosts", *command])
    text = f"`{line}`: {header['collective']}, out of place, medians. {settings_line(header)}."
    return ["; ".join(machine_lines(header)) + ".", "", text]


def _rows(report: dict[str, Any], layout: str, rate: str) -> Iterator[str]:
    for row in report["rows"]:
        place = row["out_of_place"] or row["in_place"]
        ours, peer = place["seconds"]["median"], place["peer"]["seconds"]["median"]
        nbytes, ratio = row["nbytes"], place["peer"]["ratio"]
        figures = f"{ours * 1e6:.1f} | {peer * 1e6:.1f} | {ratio:.2f} | {nbytes / ours / 1e9:.3f}"
        yield f"| {layout} | {rate} | {nbytes} | {figures} |"
