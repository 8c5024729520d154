"""Compressed gradients between hosts: `python -m bench.hosts.compression --markdown FILE`.

Hosts and links are those of `python -m bench.hosts`. A step reduces gradients of float32, 4.2
million elements in all, whose shapes are those of a small transformer; the repeats of the
compressions alternate. BLAS has one thread on each rank. Bytes are those that the first host's
network device sent, protocols' headers included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import collectives
from bench.environment import machine
from bench.hosts.namespaces import hosts, launch_line, shape
from bench.hosts.options import add_options
from bench.hosts.table import print_table
from bench.reports.columns import machine_lines
from collectives.compression import CompressedReducer, parse

EXACT = "exact"
_LAYERS, _WIDTH = 5, 256
_LAYER = [(3 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH)]
_SHAPES = [*_LAYER, (_WIDTH,), (_WIDTH,)] * _LAYERS + [(1024, _WIDTH)]
_HEADER = """\
| hosts × ranks | link | compression | step (ms) | exact / compressed | sent (MB) |
|---|---|---|---:|---:|---:|"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every layout over every link; 2 where that isn't possible here."""
    options = _options(arguments)
    if options.json is not None:
        return _measure_here(options)
    command = sys.argv[1:] if arguments is None else arguments
    return print_table(options, _measure, partial(_head, command), _rows)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hosts.compression", description=__doc__)
    add_options(parser, rates="200mbit,1gbit", repeats=10)
    parser.add_argument(
        "--compressions",
        type=_compressions,
        default="float16,bfloat16,powersgd(4),topk(0.01)",
        help="default: float16,bfloat16,powersgd(4),topk(0.01)",
    )
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _compressions(text: str) -> str:
    """A comma list of what `CompressedReducer` knows, as it is given."""
    for name in text.split(","):
        try:
            parse(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _measure(
    mpirun: str, count: int, ranks: int, rate: str, options: argparse.Namespace
) -> dict[str, Any]:
    """What `_measure_here` reports on so many hosts."""
    with hosts(count) as (addresses, agent), tempfile.TemporaryDirectory() as folder:
        shape(agent, addresses, rate)
        report = Path(folder) / "report.json"
        line, environment = launch_line(mpirun, agent, addresses, [ranks] * count)
        # The hosts share the cores, so that more threads than ranks would wait for each other.
        line += ["env", "OPENBLAS_NUM_THREADS=1", sys.executable]
        line += ["-m", "bench.hosts.compression", "--json", str(report)]
        line += ["--compressions", options.compressions, "--repeats", str(options.repeats)]
        subprocess.run(line, env=os.environ | environment, check=True, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def _measure_here(options: argparse.Namespace) -> int:
    """On every rank: the seconds of the slowest, and the bytes that rank 0's host sent."""
    comm = collectives.world(deadline=300)
    chance = np.random.default_rng(comm.rank)
    gradients = [chance.standard_normal(each, np.float32) for each in _SHAPES]

    def exact() -> Any:
        return comm.all_reduce_many(gradients, "mean")

    def compressed(name: str) -> Callable[[], Any]:
        reducer = CompressedReducer(comm, name)
        return lambda: reducer.all_reduce_many(gradients)

    steps = {EXACT: exact}
    steps |= {name: compressed(name) for name in options.compressions.split(",")}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[int]] = {name: [] for name in steps}
    for _ in range(1 + options.repeats):
        for name, step in steps.items():
            comm.barrier()
            before, start = _bytes_sent(), time.perf_counter()
            step()
            taken = comm.all_reduce(np.array(time.perf_counter() - start), "max")
            seconds[name].append(float(taken))
            sent[name].append(_bytes_sent() - before)
    rows = [
        {"name": name, "seconds": median(seconds[name][1:]), "sent": median(sent[name][1:])}
        for name in steps
    ]
    if comm.rank == 0:
        report = {"header": machine(), "rows": rows}
        options.json.write_text(json.dumps(report), encoding="utf-8")
    return 0


def _bytes_sent() -> int:
    """By all network devices of this host but the loopback (proc_pid_net(5))."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    devices = dict(line.split(":") for line in lines)
    return sum(int(numbers.split()[8]) for name, numbers in devices.items() if name.strip() != "lo")


def _head(command: Sequence[str], report: dict[str, Any]) -> list[str]:
    """What was measured, and on what."""
    line = " ".join(["python -m bench.hosts.compression", *command])
    described = "; ".join(machine_lines(report["header"]))
    return [f"{described}.", "", f"`{line}`: medians.", "", *_HEADER.splitlines()]


def _rows(report: dict[str, Any], layout: str, rate: str) -> Iterator[str]:
    rows = report["rows"]
    exact = rows[0]["seconds"]
    for row in rows:
        step, sent = row["seconds"] * 1e3, row["sent"] / 1e6
        figures = f"{step:.1f} | {exact / row['seconds']:.2f} | {sent:.2f}"
        yield f"| {layout} | {rate} | {row['name']} | {figures} |"


if __name__ == "__main__":
    sys.exit(main())
