"""Numbers of rows, which ranks may choose by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.errors import in_step

ANY_ROOM = (1 << 63) - 1
"""The room of a rank without `out`."""


def check_room(counts: Sequence[int], rooms: Sequence[int]) -> None:
    """ValueError where a rank's `out` has room for another number of rows than all ranks give.

    It is raised on every rank, from what all have exchanged.
    """
    total = sum(counts)
    for rank, room in enumerate(rooms):
        if room not in (ANY_ROOM, total):
            problem = f"out has {room} rows on rank {rank}: the joined arrays have {total}"
            raise in_step(ValueError(problem))
