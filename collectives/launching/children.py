"""Processes that a rank starts: they inherit its launcher's variables, and are no ranks.

In such a process MPI_Init would end the process (MPICH), or wait for ever (Open MPI). In one that
was forked after MPI had started, its calls would be taken for those of the rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from collectives.errors import LaunchError
from collectives.launching.launcher import ALLOW_SINGLETON, find_launcher, started_by_mpi
from collectives.launching.library import is_initialized

# The process that is the rank, and its place in the job.
_RANK_PROCESS = "COLLECTIVES_RANK_PROCESS"

# What connects a process to its launcher: MPICH's mpirun, and every launcher that serves PMIx.
_CONNECTION = ("PMI_FD", "PMI_RANK", "PMI_SIZE", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_URI")


def mark_rank() -> None:
    """Let the processes that this one starts know that it is the rank.

    MPICH's socket is inherited otherwise, by `os.system` for example: such a process would take the
    launcher's answers to the rank.
    """
    if (socket := os.environ.get("PMI_FD", "")).isdigit() and started_by_mpi(os.environ):
        os.set_inheritable(int(socket), False)
    if place := _place(os.environ):
        os.environ[_RANK_PROCESS] = f"{os.getpid()} {place}"


def leave_job_of_parent() -> None:
    """If a rank started this process, let MPI start it as a world of one.

    Raises LaunchError where COLLECTIVES_ALLOW_SINGLETON does not permit it.
    """
    if not _started_by_rank(os.environ):
        return
    if os.environ.get(ALLOW_SINGLETON) != "1":
        launcher = find_launcher(os.environ)
        raise no_rank(f"rank {launcher.rank} of {launcher.size}")
    for name in [name for name in os.environ if name.startswith(_CONNECTION)]:
        del os.environ[name]


_forked = False
"""Whether this process was forked after MPI had started."""


def _begin_child() -> None:
    global _forked
    _forked = _forked or is_initialized()


os.register_at_fork(after_in_child=_begin_child)


def refuse_forked() -> None:
    """Raise LaunchError in a process that was forked after MPI had started."""
    if _forked:
        raise LaunchError("this process was forked after MPI had started in its parent: no rank")


def no_rank(parent: str) -> LaunchError:
    """The error of a process that this parent has started."""
    return LaunchError(
        f"this process is no rank: {parent} has started it, or has replaced itself by it (exec)."
        f" {ALLOW_SINGLETON}=1 lets it run as a world of one"
    )


def _started_by_rank(environment: Mapping[str, str]) -> bool:
    if environment.get("PMI_FD", "").isdigit():
        return not started_by_mpi(environment)
    process, _, place = environment.get(_RANK_PROCESS, "").partition(" ")
    return bool(place) and place == _place(environment) and process != str(os.getpid())


def _place(environment: Mapping[str, str]) -> str:
    """Job and rank by PMIx; "" without it."""
    job, rank = (environment.get(name, "") for name in ("PMIX_NAMESPACE", "PMIX_RANK"))
    return f"{job} {rank}" if job and rank else ""
