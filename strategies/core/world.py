"""The communicator of a strategy: the one given, or that of all ranks."""

from __future__ import annotations

from typing import Any

import collectives
from collectives import Communicator


def world_of(communicator: Any) -> Communicator:
    """The communicator itself; None: that of all ranks.

    Raises TypeError for anything else. One of mpi4py isn't wrapped, since the duplicate would have
    to be closed by the caller.
    """
    if communicator is None:
        return collectives.world()
    if isinstance(communicator, Communicator):
        return communicator
    kind = type(communicator)
    text = f"communicator is a {kind.__module__}.{kind.__qualname__}: must be a"
    if kind.__module__.partition(".")[0] == "mpi4py":
        raise TypeError(f"{text} collectives.Communicator; make one by Communicator(comm)")
    raise TypeError(f"{text} collectives.Communicator, or None for that of all ranks")
