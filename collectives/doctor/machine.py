"""The MPI library, and the machines on which its ranks run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from collectives.communicator import Communicator
from collectives.doctor.attempt import Outcome, attempt, reasons
from collectives.doctor.packages import versions
from collectives.doctor.report import Report, counted, ranges, ranks_by, ranks_named
from collectives.launching.library import library_name

_SHARED_MEMORY = "/dev/shm"
_AUTOGROUP = "/proc/sys/kernel/sched_autogroup_enabled"
# Docker's default.
_SMALL_SHARED_MEMORY = 64 << 20
_WINDOW_BYTES = 4096


@dataclass(frozen=True)
class RankFacts:
    """Facts about one rank's process and machine."""

    node: int
    host: str
    cores: frozenset[int]
    shared_memory: tuple[int, int] | None
    """Free and total bytes of /dev/shm, or None if there is none."""
    versions: dict[str, str | None]
    autogroup: bool = False
    """Whether the kernel divides the cores between sessions (sched(7))."""


def gather_facts(mpi: Any, comm: Communicator) -> list[RankFacts]:
    """Every rank's facts, in rank order. Collective."""
    own = RankFacts(
        node=comm.node,
        host=mpi.Get_processor_name(),
        cores=frozenset(os.sched_getaffinity(0)),
        shared_memory=_shared_memory(),
        versions=versions(),
        autogroup=_reads_one(_AUTOGROUP),
    )
    facts: list[RankFacts] = mpi.COMM_WORLD.allgather(own)
    return facts


def report_mpi(report: Report, mpi: Any) -> None:
    """Report the library, its standard, and its thread level."""
    report.row("library", library_name(mpi))
    report.row("standard", "MPI " + ".".join(map(str, mpi.Get_version())))
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    names = {getattr(mpi, f"THREAD_{level}"): level for level in levels}
    report.row("thread level", names[mpi.Query_thread()])
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        report.warn("below MULTIPLE, asynchronous calls run at once, in the calling thread")


def report_ranks(report: Report, facts: list[RankFacts]) -> None:
    """Report which ranks run where, on how many cores, and whether their software agrees."""
    nodes = ranks_by(each.node for each in facts)
    report.section("Ranks")
    report.row("ranks", len(facts))
    report.row("nodes", len(nodes))
    for node, ranks in nodes.items():
        _report_node(report, node, {rank: facts[rank] for rank in ranks})
    for name in facts[0].versions:
        _report_differences(report, name, [each.versions[name] for each in facts])


def report_shared_memory(
    report: Report, mpi: Any, facts: list[RankFacts], limit: float
) -> list[Outcome]:
    """Report whether a node's ranks can share memory, and how much; the outcomes. Collective."""
    report.section("Shared memory")
    outcomes = attempt(mpi, lambda: _try_window(mpi), limit)
    problems = reasons(outcomes)
    report.row("MPI window", "can't be shared" if problems else "can be shared on every node")
    for problem in problems:
        report.warn(problem)
    for node, ranks in ranks_by(each.node for each in facts).items():
        _report_space(report, node, facts[ranks[0]].shared_memory)
    return outcomes


def _report_node(report: Report, node: int, facts: dict[int, RankFacts]) -> None:
    hosts = ", ".join(sorted({each.host for each in facts.values()}))
    cores: frozenset[int] = frozenset().union(*(each.cores for each in facts.values()))
    where = f"{counted(len(cores), 'core')} ({ranges(cores)})"
    report.row(f"node {node}", f"{hosts}: {ranks_named(facts)} on {where}")
    if len(facts) > len(cores):
        report.warn(f"{len(facts)} ranks share {counted(len(cores), 'core')}: oversubscribed")
        if any(each.autogroup for each in facts.values()):
            report.warn(
                "programs of other sessions may get no core while ranks yield theirs in MPI;"
                " sysctl kernel.sched_autogroup_enabled=0 shares the cores evenly"
            )


def _report_differences(report: Report, name: str, found: list[str | None]) -> None:
    ranks = ranks_by(found)
    if len(ranks) > 1:
        report.row(name, "differs")
        report.warn("; ".join(f"{each} on {ranks_named(where)}" for each, where in ranks.items()))


def _report_space(report: Report, node: int, space: tuple[int, int] | None) -> None:
    label = f"{_SHARED_MEMORY}, node {node}"
    if space is None:
        report.row(label, "missing")
        return
    free, size = space
    report.row(label, f"{free >> 20} MiB of {size >> 20} MiB free")
    if free <= _SMALL_SHARED_MEMORY:
        report.warn("little for MPI's buffers; in docker, start with --shm-size=1g")


def _reads_one(setting: str) -> bool:
    try:
        with open(setting, encoding="ascii") as found:
            return found.read().strip() == "1"
    except OSError:
        return False


def _shared_memory() -> tuple[int, int] | None:
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _try_window(mpi: Any) -> None:
    """Read, through a shared window, what the next rank of the node wrote."""
    node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    window = mpi.Win.Allocate_shared(_WINDOW_BYTES, 1, comm=node)
    window.Fence()
    window.tomemory()[0] = node.rank % 256
    window.Fence()
    peer = (node.rank + 1) % node.size
    found = window.Shared_query(peer)[0][0]
    window.Free()
    node.Free()
    if found != peer % 256:
        raise RuntimeError(f"read {found} where rank {peer} of the node wrote {peer % 256}")
