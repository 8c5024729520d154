"""What is to be done where the program itself ends MPI, whose calls would end the process then."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from mpi4py import MPI

_actions: list[weakref.WeakMethod[Callable[[], None]]] = []
_watched = False


def before_end(action: Callable[[], None]) -> None:
    """Run a bound method in MPI_Finalize, unless its object is gone by then.

    MPI_Finalize first deletes the attributes of MPI_COMM_SELF (MPI 4.1, section 11.2.4).
    """
    global _watched
    if not _watched:
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_run), None)
        _watched = True
    _actions[:] = [each for each in _actions if each() is not None]
    _actions.append(weakref.WeakMethod(action))


def _run(*_: object) -> None:
    for each in _actions:
        action = each()
        if action is not None:
            action()
