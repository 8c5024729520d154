"""The start and the end, and sets of ranks that make calls among themselves."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from collectives.communicator import Communicator
from collectives.consistency.signature import check_index
from collectives.world import world

_comm: Communicator | None = None


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


def is_homogeneous() -> bool:
    """Whether all nodes have as many processes."""
    return len(set(ranks()._engine.layout.local_sizes)) == 1


class ProcessSet:
    """Some of the ranks; usable once it was given to `init` or `add_process_set`."""

    process_set_id: int | None = None
    """The same number on every rank, from 1; None before the set was added."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """`ranks` are numbers of ranks among all; TypeError for an MPI communicator."""
        self.ranks = sorted({operator.index(each) for each in ranks})
        self._comm: Communicator | None = None
        """That of the set's ranks; on a rank that is not in it, of this rank alone."""

    def included(self) -> bool:
        """Whether this rank is in the set. ValueError before it was added."""
        self._check_added()
        return rank() in self.ranks

    def rank(self) -> int:
        """This rank's number within the set. ValueError if it is not in it."""
        return self.comm().rank

    def size(self) -> int:
        """The number of ranks in it. ValueError before it was added."""
        self._check_added()
        return len(self.ranks)

    def comm(self) -> Communicator:
        """The communicator of its ranks. ValueError if this rank is not one of them."""
        if not self.included():
            raise ValueError(
                f"process_set={self}: rank {rank()} is not in it, and makes no call there"
            )
        return self.trainers()

    def trainers(self) -> Communicator:
        """The same; where this rank is not one of them, its own communicator of one rank."""
        self._check_added()
        assert self._comm is not None
        return self._comm

    def index(self, rank: int) -> int:
        """The number within the set of a rank among all. ValueError if it is not in it."""
        if rank not in self.ranks:
            raise ValueError(f"root_rank={rank}: must be one of {self}")
        return self.ranks.index(rank)

    def _check_added(self) -> None:
        ranks()
        if self.process_set_id is None:
            raise ValueError(f"process_set={self}: give it to hvd.add_process_set, on every rank")

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"


class _All(ProcessSet):
    """Every rank."""

    process_set_id = 0

    def __init__(self) -> None:
        """The ranks are those of `init`."""

    def comm(self) -> Communicator:
        return ranks()

    trainers = comm

    def index(self, rank: int) -> int:
        return rank

    def __getattr__(self, name: str) -> Any:
        if name == "ranks":
            return list(range(size()))
        raise AttributeError(f"ProcessSet has no {name}")

    def __repr__(self) -> str:
        # `ranks` are not known before `init`.
        return "ProcessSet of all ranks"


global_process_set: ProcessSet = _All()
_added: list[ProcessSet] = []
_next_number = 1


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start MPI, if it is not started yet, and add the process sets. Collective.

    `process_sets="dynamic"` does nothing, because sets may be added at any time. Raises
    NotImplementedError for a communicator, LaunchError like `collectives.world`.
    """
    if comm is not None:
        raise NotImplementedError(
            "init with a communicator: Horovod's calls use all ranks here, or a process set:"
            " hvd.add_process_set(ranks)"
        )
    global _comm
    _comm = world()
    if process_sets is not None and process_sets != "dynamic":
        for each in process_sets:
            add_process_set(each)  # type: ignore[arg-type]  # not the text, which is one


def shutdown() -> None:
    """End the use of Horovod's calls, without a wait for other ranks.

    MPI, `collectives.world()` and the communicators of process sets go on until the exit.
    """
    for each in _added:
        each.process_set_id = None
    _added.clear()
    global _comm
    _comm = None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks usable. Collective: every rank calls it with the same set.

    Raises ValueError for ranks that do not exist, or a set of ranks that was added before, and a
    MismatchError on every rank if the sets differ.
    """
    global _next_number
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    comm = ranks()
    if not given.ranks or not set(given.ranks) <= set(range(comm.size)):
        raise ValueError(f"process_set={given}: must have ranks from 0 to {comm.size - 1}")
    if any(each.ranks == given.ranks for each in (global_process_set, *_added)):
        raise ValueError(f"process_set={given}: a set of these ranks exists")
    comm.barrier(f"hvd.add_process_set({given.ranks})")
    given._comm = comm.split(0 if comm.rank in given.ranks else 1 + comm.rank)
    given.process_set_id, _next_number = _next_number, _next_number + 1
    _added.append(given)
    return given


def remove_process_set(process_set: ProcessSet) -> bool:
    """Release a set's communicator, and return whether there was one. Collective."""
    if process_set not in _added:
        return False
    ranks().barrier(f"hvd.remove_process_set({process_set.ranks})")
    _added.remove(process_set)
    process_set.process_set_id = None
    comm, process_set._comm = process_set._comm, None
    if comm is not None:
        comm.close()
    return True


def ranks_of(process_set: ProcessSet | None) -> Communicator:
    """The communicator of a set's ranks, of all where it is None."""
    return ranks() if process_set is None else process_set.comm()


def root_of(process_set: ProcessSet | None, root_rank: int) -> int:
    """The number within the set of a rank among all."""
    if process_set is None:
        return check_index("root_rank", root_rank, ranks().size)
    return process_set.index(root_rank)
