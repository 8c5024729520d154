"""torch's store at the address that torchrun gives."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from collectives.errors import DeadlineExceededError, LaunchError
from collectives.launching.launcher import TorchLaunch, mpirun_command

_kept: list[Any] = []


def open_store(launch: TorchLaunch, seconds: float) -> Any:
    """The store of all ranks, for the start of MPI alone. It is kept as long as this process.

    Other ranks may read from rank 0's, and init_process_group opens it again.

    Raises LaunchError if torch is not installed, DeadlineExceededError if rank 0, or torchrun, does
    not serve the store within `seconds`.
    """
    try:
        from torch.distributed import DistNetworkError, PrefixStore, TCPStore
    except ImportError as error:
        raise LaunchError(
            f"{launch.size} processes were started (WORLD_SIZE={launch.size}) without mpirun. They"
            " find each other by torch's store, and torch can't be imported: `pip install torch`,"
            f" or type {mpirun_command(launch.size)}"
        ) from error
    serves = launch.rank == 0 and not launch.agent_store
    try:
        store = TCPStore(
            launch.host,
            launch.port,
            launch.size,
            is_master=serves,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
    except DistNetworkError as error:
        if serves:
            raise LaunchError(f"rank 0 can't serve torch's store: {error}") from error
        raise DeadlineExceededError(
            f"rank {launch.rank} of {launch.size}: {launch.host}:{launch.port}, the store that"
            f" {'torchrun' if launch.agent_store else 'rank 0'} serves, did not answer within"
            f" {seconds:g} s",
            () if launch.agent_store else (0,),
        ) from error
    _kept.append(store)
    return PrefixStore("collectives", store)


def host_of(store: Any) -> str | None:
    """The host that serves a store of torch; None for a store without a server."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
