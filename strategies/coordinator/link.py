"""What connects a chief with its workers: who is who, and a way for messages."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from collectives.errors import RankFailedError
from strategies.cluster.membership import Membership
from strategies.coordinator.messages import Box, End

if TYPE_CHECKING:
    from strategies.coordinator.coordinator import ClusterCoordinator


class Link:
    """One rank's end. Ranks are those of the whole world.

    On the chief it lets the workers go when the program ends.
    """

    def __init__(
        self, box: Box, chief: int, workers: Mapping[int, str], servers: Mapping[int, str]
    ) -> None:
        """`workers` and `servers` are ranks and what they are called."""
        self.box, self.chief, self.workers, self.servers = box, chief, workers, servers
        self.coordinator: ClusterCoordinator | None = None
        self._ended = False
        if self.is_chief:
            atexit.register(self.end)

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the one that schedules."""
        return self.box.rank == self.chief

    def end(self) -> None:
        """Let the workers go, on the chief. A second call does nothing."""
        atexit.unregister(self.end)
        if self.coordinator is not None:
            self.coordinator.end()
        elif not self._ended:
            for worker in self.workers:
                with suppress(RankFailedError):
                    self.box.send(worker, End())
        self._ended = True


def open_link(membership: Membership) -> Link | None:
    """Between all ranks of the world; None where it has no chief. Collective."""
    chiefs = membership.ranks_of("chief")
    if not chiefs:
        return None
    workers, servers = _named(membership, "worker"), _named(membership, "ps")
    return Link(membership.world.mailbox(), chiefs[0], workers, servers)


def _named(membership: Membership, role: str) -> dict[int, str]:
    ranks = membership.ranks_of(role)
    return {rank: f"{membership.places[rank].task} (rank {rank})" for rank in ranks}
