"""The roles of the ranks of a cluster with parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.cluster.membership import Membership


@dataclass(frozen=True)
class Roles:
    """The world's ranks by role, each in the order of their tasks."""

    workers: tuple[int, ...]
    """With the chief."""
    servers: tuple[int, ...]
    chief: int
    tasks: tuple[str, ...]
    """The name of each rank's task."""

    @classmethod
    def of(cls, membership: Membership) -> Roles:
        """The roles in the cluster."""
        workers = membership.ranks_of("chief", "worker")
        servers = membership.ranks_of("ps")
        chief = next(rank for rank in workers if membership.places[rank].is_chief)
        tasks = tuple(str(place.task) for place in membership.places)
        return cls(tuple(workers), tuple(servers), chief, tasks)

    def name(self, rank: int) -> str:
        """A rank in messages."""
        return f"{self.tasks[rank]} (rank {rank})"
