"""What a communicator is made from: the backend's name, and the transport over MPI."""

from __future__ import annotations

from typing import Any

from collectives.launching.children import refuse_forked
from collectives.launching.start import start_mpi
from collectives.transports.base import Transport

BACKENDS = ("auto", "mpi", "nccl")


def check_backend(backend: str) -> None:
    """Raise ValueError for an unknown backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be 'auto', 'mpi' or 'nccl'")


def transport_over(source: Any) -> Transport:
    """The transport itself, or one over a duplicate of an mpi4py communicator.

    LaunchError for several ranks in a process that was forked after MPI had started.
    """
    if isinstance(source, Transport):
        return source
    if not isinstance(source, start_mpi().Intracomm):
        kind = type(source).__name__
        raise TypeError(f"mpi_comm is a {kind}: must be an mpi4py Intracomm or a Transport")
    if source.size > 1:
        refuse_forked()
    from collectives.transports.mpi import MpiTransport

    return MpiTransport(source.Dup())
