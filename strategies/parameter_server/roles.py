"""Who is who among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.cluster.membership import Membership


@dataclass(frozen=True)
class Roles:
    """The world's ranks by what they do, each in the order of their tasks."""

    workers: tuple[int, ...]
    """The chief, too."""
    servers: tuple[int, ...]
    chief: int
    tasks: tuple[str, ...]
    """The name of each rank's task."""

    @classmethod
    def of(cls, membership: Membership) -> Roles:
        """As the cluster says."""
        workers = membership.ranks_of("chief", "worker")
        servers = membership.ranks_of("ps")
        chief = next(rank for rank in workers if membership.places[rank].is_chief)
        tasks = tuple(str(place.task) for place in membership.places)
        return cls(tuple(workers), tuple(servers), chief, tasks)

    def name(self, rank: int) -> str:
        """A rank for messages."""
        return f"{self.tasks[rank]} (rank {rank})"
