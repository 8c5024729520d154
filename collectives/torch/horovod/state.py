"""The ranks, between `init` and `shutdown`."""

from __future__ import annotations

from collectives.communicator import Communicator
from collectives.world import world

_comm: Communicator | None = None


def begin() -> None:
    """Start MPI, if it is not started yet."""
    global _comm
    _comm = world()


def end() -> None:
    """Forget the ranks."""
    global _comm
    _comm = None


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not called since."""
    return _comm is not None


def ranks() -> Communicator:
    """The communicator of all ranks. ValueError before `init`."""
    if _comm is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _comm


def rank() -> int:
    """The number of this process, from 0 to size() − 1."""
    return ranks().rank


def size() -> int:
    """The number of processes."""
    return ranks().size


def local_rank() -> int:
    """The number of this process among those of its node."""
    return ranks().local_rank


def local_size() -> int:
    """The number of processes on this node."""
    return ranks().local_size


def cross_rank() -> int:
    """The number of this process's node."""
    return ranks().node


def cross_size() -> int:
    """The number of nodes."""
    return ranks().nodes
