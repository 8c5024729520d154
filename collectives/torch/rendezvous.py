"""Rendezvous through MPI: no variable, no port on a single host."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from collectives.communicator import Communicator
from collectives.world import world


def rendezvous(
    url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield torch's store, this process's rank and the number of ranks, as in MPI.

    Raises ValueError if the URL holds another rank or size, as `init_process_group(rank=…)` does.
    """
    comm = world()
    given = parse_qs(urlparse(url).query)
    for name, actual in (("rank", comm.rank), ("world_size", comm.size)):
        wanted = int(given.get(name, [-1])[0])
        if wanted not in (-1, actual):
            raise ValueError(f"{name}={wanted}: MPI has given this process {name}={actual}")
    yield _open_store(comm, timeout), comm.rank, comm.size
    raise RuntimeError(f"{url}: the ranks of an MPI program have one rendezvous")


def _open_store(comm: Communicator, timeout: timedelta) -> Any:
    """A file on a single host, otherwise a port of rank 0."""
    if comm.nodes == 1:
        path = comm.broadcast_object(_new_file() if comm.rank == 0 else None)
        store = dist.FileStore(path, comm.size)
        store.set_timeout(timeout)
        return store
    server = None
    if comm.rank == 0:
        server = dist.TCPStore(
            socket.gethostname(), 0, comm.size, True, timeout, wait_for_workers=False
        )
    address = None if server is None else (socket.gethostname(), server.port)
    host, port = comm.broadcast_object(address)
    return server or dist.TCPStore(host, port, comm.size, False, timeout, wait_for_workers=False)


def _new_file() -> str:
    """A file that only this user can read; the last rank's store removes it."""
    handle, path = tempfile.mkstemp(prefix="collectives-store-")
    os.close(handle)
    return path
