"""Shared windows (MPI 4.1, section 12.2.3), in an order in which MPI_Finalize can free them.

Open MPI frees there the windows that are left, in the order of its table, and each waits for all
its ranks. Two ranks with two windows in another order would wait for each other for ever. A new
window takes the first free place of the table. Therefore a freed one leaves no place free: one of
this process alone takes it, until those after it are freed.

The order may still differ where the program frees windows of its own, and where one thread makes a
window while another makes or frees one; asynchronous calls make theirs in a thread, but free them
before the program ends.
"""

from __future__ import annotations

import os
import threading

from mpi4py import MPI

# Selects the components that Open MPI may use for windows; all of them if unset.
_COMPONENTS = "OMPI_MCA_osc"
_table: list[tuple[MPI.Win, bool]] = []
"""The windows of Open MPI, and whether each only takes the place of a freed one."""
_lock = threading.Lock()


def allocate(comm: MPI.Intracomm, nbytes: int) -> MPI.Win:
    """A window with so many bytes of this rank. Collective."""
    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
    window = MPI.Win.Allocate_shared(nbytes, 1, info, comm)
    info.Free()
    if _is_open_mpi():
        with _lock:
            _table.append((window, False))
    # Access by load and store needs an epoch (MPI 4.1, 12.7).
    window.Lock_all(MPI.MODE_NOCHECK)
    return window


def free(window: MPI.Win) -> None:
    """Free a window that `allocate` returned. Collective."""
    window.Unlock_all()
    window.Free()
    if _is_open_mpi():
        with _lock:
            _keep_order(window)


def _keep_order(freed: MPI.Win) -> None:
    place = next(at for at, (each, _) in enumerate(_table) if each is freed)
    if place + 1 < len(_table):
        _table[place] = MPI.Win.Allocate_shared(1, comm=MPI.COMM_SELF), True
        return
    _table.pop()
    while _table and _table[-1][1]:
        _table.pop()[0].Free()


def may_crash() -> bool:
    """Whether creating a window is unsafe while another thread creates one.

    Open MPI queries each of its components for every window, and querying the UCX component is not
    thread-safe. It is active if MPI was initialized before this package could exclude it.
    """
    if not _is_open_mpi():
        return False
    chosen = os.environ.get(_COMPONENTS, "")
    named = "ucx" in chosen.removeprefix("^").split(",")
    return not chosen or named != chosen.startswith("^")


def _is_open_mpi() -> bool:
    return MPI.Get_library_version().startswith("Open MPI")
