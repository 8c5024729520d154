"""The report of a run with a framework: the command, the environment, and tables, as Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.environment import machine
from bench.output_paths import problem_of


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option for `finish`."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the tables there")


def check_output(world: Any, options: argparse.Namespace) -> None:
    """Exit with status 2, on every rank, where rank 0 can't write to `--output`."""
    problem = problem_of(world, options, "output")
    if problem is None:
        return
    if world.rank == 0:
        print(f"bench: {problem}", file=sys.stderr, flush=True)
    sys.exit(2)


def head(module: str, world: Any, **about: object) -> list[str]:
    """The command that repeats the run, what is said about it, the libraries and the processor."""
    command = " ".join([f"mpirun -n {world.size} python -m {module}", *sys.argv[1:]])
    entries = {"command": command, **about, "ranks": world.size, **machine()}
    return [f"- {name}: {value}" for name, value in entries.items()]


def finish(title: str, lines: Iterable[str], world: Any, output: Path | None) -> None:
    """Print the report, and write it; on rank 0."""
    if world.rank == 0:
        text = "\n".join([f"# {title}", "", *lines, ""])
        print(text, flush=True)
        if output:
            output.write_text(text, encoding="utf-8")
