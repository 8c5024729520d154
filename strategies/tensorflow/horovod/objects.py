"""Pickled objects on every rank, by the arguments of Horovod for TensorFlow."""

from __future__ import annotations

from typing import Any

from collectives.horovod import objects
from collectives.horovod.process_sets import ProcessSet


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """A copy of the root's object, pickled. Outside of a `tf.function`."""
    return objects.broadcast_object(obj, root_rank, process_set=process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Copies of every rank's object in rank order, pickled. Outside of a `tf.function`."""
    return objects.allgather_object(obj, process_set=process_set)
