"""Cost of the strategies: `python -m bench.strategies --output DIR`.

Starts each program of `bench.strategy_programs` on its number of ranks, with the mpirun of this
Python, one after the other, and writes all rows into one Markdown and one JSON file. NumPy's own
threads are disabled in the programs, so that a rank uses one core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.hosts.namespaces import find_mpirun, is_open_mpi
from bench.options import Parser
from bench.output_paths import output_folder
from bench.strategy_programs.rows import read_rows

_LIMIT_SECONDS = 600
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Program:
    """One program, and its arguments."""

    module: str
    ranks: int
    arguments: str = ""

    @property
    def line(self) -> str:
        """The command that repeats it."""
        module = f"bench.strategy_programs.{self.module} {self.arguments}".strip()
        threads = " ".join(f"{name}={count}" for name, count in _ONE_THREAD.items())
        return f"{threads} mpirun -n {self.ranks} python -m {module}"


# By name: the smallest world with a training rank, and the largest useful one.
_TRAINED = {
    "default": (1, 1),
    "one_device": (1, 1),
    "mirrored": (1, 4),
    "multi-worker_mirrored": (1, 4),
    "central_storage": (1, 4),
    "local_SGD,_every_8_steps": (1, 4),
    "multi-worker_mirrored,_dataset_rank": (2, 4),
    "parameter_server": (2, 4),
    "parameter_server,_coordinator": (3, 4),
}
_WORLDS = (1, 2, 4)

SECTIONS: dict[str, list[Program]] = {
    "The synchronous step": [Program("step", 2, f"--batch {size}") for size in (32, 64, 128, 256)],
    "Steps per second": [
        Program("digits", ranks, f"--strategy {name}")
        for name, (fewest, most) in _TRAINED.items()
        for ranks in _WORLDS
        if fewest <= ranks <= most
    ],
    "A parameter server": [Program("server", 2)],
    "One slow worker": [Program("slow_worker", 4)],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or the status of the first program that failed; earlier results are kept."""
    options = _parse(arguments)
    found: list[dict[str, Any]] = []
    for title, programs in SECTIONS.items():
        if options.only not in title.lower():
            continue
        section: dict[str, Any] = {"title": title, "commands": [], "rows": []}
        found.append(section)
        for program in programs:
            ended = _run(program)
            if ended.returncode:
                print(ended.stdout, ended.stderr, sep="\n", file=sys.stderr)
                return ended.returncode
            printed = read_rows(ended.stdout)
            section["about"] = printed["about"]
            section["commands"].append(program.line)
            section["rows"] += printed["rows"]
            _write(options.output, found)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m bench.strategies", description=__doc__)
    add = parser.add_argument
    add("--output", type=output_folder, required=True, metavar="DIR", help="for the files")
    add("--only", default="", type=str.lower, help="a part of a section's title")
    options = parser.parse_args(arguments)
    if not any(options.only in title.lower() for title in SECTIONS):
        parser.error(f"--only {options.only!r}: must be a part of {', '.join(SECTIONS)}")
    return options


def _mpirun() -> str:
    found = find_mpirun()
    if found is None:
        raise SystemExit("bench.strategies: there is no mpirun beside this Python, nor in PATH")
    return found


def _run(program: Program) -> subprocess.CompletedProcess[str]:
    mpirun = _mpirun()
    # So that mpirun ends its ranks, and what they have printed is kept.
    line = ["timeout", "--foreground", "--kill-after=10", str(_LIMIT_SECONDS)]
    line += [mpirun, *(["--oversubscribe"] if is_open_mpi(mpirun) else [])]
    line += ["-n", str(program.ranks), sys.executable, "-m"]
    line += [f"bench.strategy_programs.{program.module}", *program.arguments.split()]
    print(program.line, flush=True)
    return subprocess.run(
        line,
        env=os.environ | _ONE_THREAD,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def _write(folder: Path, found: Sequence[dict[str, Any]]) -> None:
    mpi = "openmpi" if is_open_mpi(_mpirun()) else "mpich"
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"strategies-{mpi}"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    header = f"# Strategies, {mpi}\n\n{os.cpu_count()} cores, NumPy {np.__version__}, "
    header += f"Python {sys.version.split()[0]}\n"
    parts = [_markdown(section) for section in found]
    stem.with_suffix(".md").write_text("\n".join([header, *parts]), encoding="utf-8")


def _markdown(section: dict[str, Any]) -> str:
    columns = list(dict.fromkeys(name for row in section["rows"] for name in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [
        f"| {' | '.join(str(row.get(name, '')) for name in columns)} |" for row in section["rows"]
    ]
    commands = "".join(f"    {command}\n" for command in section["commands"])
    head = f"## {section['title']}\n\n{section['about']}\n\n{commands}\n"
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
