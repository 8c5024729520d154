"""A run of the benchmark. Every rank measures; only rank 0 prints and writes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import collectives
from bench.cases import CASES
from bench.cases.base import Case
from bench.environment import describe
from bench.measure import Bench
from bench.options import ALL, parse, problems
from bench.output_paths import problem_of
from bench.peers import open_peer
from bench.peers.base import Peer, PeerUnavailableError
from bench.reports import open_table
from bench.reports.columns import Column, columns
from bench.reports.files import write_json, write_markdown
from bench.rows import Row
from bench.stream import measure_stream

CAN_NOT_MEASURE = 2


class CanNotMeasureError(RuntimeError):
    """The requested measurement is not possible; raised on every rank."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status, the same on every rank."""
    options = parse(arguments)
    return status_of(lambda comm: sum(row.wrong for row in measure(comm, options).rows))


def status_of(count_wrong: Callable[[collectives.Communicator], int], backend: str = "auto") -> int:
    """The exit status of a program that counts wrong elements, the same on every rank."""
    try:
        comm = collectives.world(backend=backend)
    except collectives.BackendUnavailableError as error:
        print(f"bench: {error}", file=sys.stderr)
        return CAN_NOT_MEASURE
    try:
        return int(count_wrong(comm) > 0)
    except (CanNotMeasureError, PeerUnavailableError) as error:
        if comm.rank == 0:
            print(f"bench: {error}", file=sys.stderr)
        return CAN_NOT_MEASURE


def check_outputs(
    world: Any, options: argparse.Namespace, *names: str, folder: bool = False
) -> None:
    """Raise CanNotMeasureError on every rank where rank 0 can't write to these options' paths."""
    problem = problem_of(world, options, *names, folder=folder)
    if problem is not None:
        raise CanNotMeasureError(problem)


@dataclass(frozen=True)
class Run:
    """Header, columns and rows of a run."""

    header: dict[str, Any]
    columns: list[Column]
    rows: list[Row]


def measure(comm: collectives.Communicator, options: argparse.Namespace) -> Run:
    """Measure and report as requested."""
    from mpi4py import MPI

    if options.root >= comm.size:
        raise CanNotMeasureError(f"--root is {options.root}: there are {comm.size} ranks")
    check_outputs(MPI.COMM_WORLD, options, "json", "markdown", "plot")
    # Only rank 0 plots, and the other hosts need no matplotlib.
    if MPI.COMM_WORLD.bcast(options.plot is not None and find_spec("matplotlib") is None):
        raise CanNotMeasureError("--plot needs matplotlib: pip install 'mpi-collectives[bench]'")
    case = CASES[options.collective]
    world = MPI.COMM_WORLD.Dup()
    stack = ExitStack()
    stack.callback(world.Free)
    try:
        peer = open_peer(options.peer, world) if options.peer else None
        if peer:
            stack.callback(peer.close)
        run = _measured(comm, world, options, case, peer)
    except (CanNotMeasureError, PeerUnavailableError):
        # Of all ranks, as the ends are; another error may be of this one alone.
        stack.close()
        raise
    stack.close()
    return run


def _measured(
    comm: collectives.Communicator,
    world: Any,
    options: argparse.Namespace,
    case: Case,
    peer: Peer | None,
) -> Run:
    stream = measure_stream(world) if options.stream else None
    bench = Bench(comm, world, case, options.settings, peer, stream)
    names, notes = _usable(bench, options, comm.size)
    shown = columns(case, options.peer, names, stream=options.stream)
    run = Run(describe(comm, options, peer, stream), shown, [])
    report = Report(options, run) if comm.rank == 0 else None
    for problem in problems(options, comm.size):
        for row in bench.rows(problem, names):
            run.rows.append(row)
            if report:
                report.table.add(row)
    if report:
        report.finish(notes)
    return run


def _usable(bench: Bench, options: argparse.Namespace, ranks: int) -> tuple[list[str], list[str]]:
    """The algorithms that support the dtype and op, and the reasons of the others."""
    names, notes = [], []
    for name in options.algorithms:
        try:
            bench.try_out(problems(options, ranks)[0], name)
            names.append(name)
        except (TypeError, ValueError) as error:
            notes.append(f"can't measure {name}: {error}")
    if notes and (options.algorithm != ALL or not names):
        raise CanNotMeasureError("; ".join(notes))
    return names, notes


class Report:
    """The output of rank 0."""

    def __init__(self, options: argparse.Namespace, run: Run) -> None:
        self._options, self._run = options, run
        self.table = open_table(run.header, run.columns)

    def finish(self, notes: list[str]) -> None:
        """Close the table and write the files."""
        header, rows = self._run.header, self._run.rows
        wrong = sum(row.wrong for row in rows)
        verdict = f"{wrong} WRONG elements" if wrong else "all results exact"
        self.table.close([*notes, verdict])
        options = self._options
        if options.json:
            write_json(options.json, header, rows)
        if options.markdown:
            write_markdown(options.markdown, header, self._run.columns, rows)
        if options.plot:
            from bench.reports.plot import write_plot

            write_plot(options.plot, header, rows)
