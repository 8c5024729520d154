"""The start of MPI, by its launcher or through a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from collectives.errors import LaunchError, UnusableError
from collectives.launching.children import leave_job_of_parent, mark_rank, no_rank
from collectives.launching.ending import end_with_world, killed_with_world
from collectives.launching.exchange import Exchange, Listening
from collectives.launching.launcher import (
    ALLOW_SINGLETON,
    find_torch_launch,
    mpich_advice,
    started_by_mpi,
)
from collectives.launching.library import (
    initialize,
    is_initialized,
    library_name,
    load,
    load_uninitialized,
)
from collectives.launching.torch_store import host_of, open_store
from collectives.waiting.wait_policy import DEFAULT_DEADLINE

# The launch of this rank; the processes that it starts inherit it.
_STARTED = "COLLECTIVES_STARTED"

_session = ""


def session() -> str:
    """A name of this attempt that no earlier one had, the same on all ranks; "" under mpirun.

    torch's store can hold keys of earlier attempts.
    """
    return _session


def start_mpi(seconds: float = DEFAULT_DEADLINE) -> Any:
    """The `mpi4py.MPI` module, initialized; under torchrun, together with all other ranks.

    Raises BackendUnavailableError if there is no MPI, LaunchError in a process that a rank has
    started, and what `start_through` raises.
    """
    launch = None
    if not is_initialized() and os.environ.get(ALLOW_SINGLETON) != "1":
        launch = find_torch_launch(os.environ)
        _refuse_child(launch)
    if launch is None or launch.size == 1 or started_by_mpi(os.environ):
        if not is_initialized():
            leave_job_of_parent()
        mpi = load()
        if mpi.Is_finalized():
            raise UnusableError("MPI.Finalize was called: MPI can't start again in this process")
        mark_rank()
        return mpi
    load_mpich(launch.size)
    return start_through(open_store(launch, seconds), launch.rank, launch.size, seconds)


def start_through(
    store: Any,
    rank: int,
    size: int,
    seconds: float,
    *,
    names: Sequence[str] = (),
    listening: Listening | None = None,
) -> Any:
    """The `mpi4py.MPI` module, initialized as this rank of so many; collective between them.

    The arguments are those of `Exchange`. Nothing is done if MPI is initialized, or if its launcher
    started the process.

    Raises BackendUnavailableError if there is no MPI, LaunchError if it isn't MPICH,
    DeadlineExceededError, which names the absent ranks, after `seconds`, and RankFailedError if a
    rank ends meanwhile.
    """
    global _session
    if size == 1 or is_initialized() or started_by_mpi(os.environ):
        return load()
    mpi = load_mpich(size)
    exchange = Exchange(store, rank, size, seconds, names=names, listening=listening)
    connection = exchange.connect(host_of(store))
    pmi = connection.pmi.detach()
    variables = {
        "PMI_FD": str(pmi),
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
    }
    os.environ.update(variables)
    with killed_with_world(connection.end):
        initialize(mpi)
    end_with_world(connection.end, pmi, rank)
    # The processes that this one starts are no ranks.
    for name in variables:
        del os.environ[name]
    _session = connection.session
    launch = find_torch_launch(os.environ) or f"rank {rank} of {size}"
    os.environ[_STARTED] = str(launch)
    return mpi


def _refuse_child(launch: object) -> None:
    """LaunchError in a process that a rank has started, unless it has a launcher of its own.

    Also in the rank's own process after `exec`, since MPI is not initialized there.
    """
    started = os.environ.get(_STARTED, "")
    if not started or started_by_mpi(os.environ):
        return
    if launch is None or str(launch) == started:
        raise no_rank(started)


def load_mpich(size: int) -> Any:
    """MPI, not initialized; LaunchError if it is another library than MPICH."""
    mpi = load_uninitialized()
    if "MPICH" not in (name := library_name(mpi)):
        raise LaunchError(
            f"{size} processes were started without mpirun, and this Python uses"
            f" {name.partition(',')[0]}. {mpich_advice(size)}"
        )
    return mpi
