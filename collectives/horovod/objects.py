"""Pickled objects on every rank."""

from __future__ import annotations

from typing import Any

from collectives.horovod.joining import Request, with_joined
from collectives.horovod.process_sets import ProcessSet, ranks_of, root_of


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """A copy of the root's object, pickled."""
    comm, root = ranks_of(process_set), root_of(process_set, root_rank)
    return with_joined(comm, Request("broadcast_object"), lambda: comm.broadcast_object(obj, root))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """Copies of every rank's object in rank order, pickled."""
    comm = ranks_of(process_set)
    return with_joined(comm, Request("allgather_object"), lambda: comm.all_gather_object(obj))
