"""Membership in a cluster: every rank's task, and the groups of ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from collectives import Communicator
from collectives.consistency.uncaught import raising_on_all
from strategies.cluster.ranks import RankPlace, assign_ranks
from strategies.cluster.tf_config import TFConfig
from strategies.cluster_resolver import ClusterResolver, SimpleClusterResolver
from strategies.core.same_error import PropagatedErrors
from strategies.core.world import world_of

# Ranks of different groups train, evaluate, feed data or hold parameters apart from each other.
_GROUPS = {"chief": 0, "worker": 0, "evaluator": 1, "data": 2, "ps": 3}


@dataclass(frozen=True)
class Membership:
    """One rank's place among those of the whole program."""

    world: Communicator
    """Of all tasks."""
    group: Communicator
    """Of the tasks that work in step with this one, numbered by their ids."""
    places: tuple[RankPlace, ...]
    """The place of each rank of the world."""
    resolver: ClusterResolver

    @property
    def place(self) -> RankPlace:
        """This rank's own."""
        return self.places[self.world.rank]

    def ranks_of(self, *roles: str) -> list[int]:
        """The world's ranks that have one of these roles, by the ids of their tasks."""
        held = [rank for rank, place in enumerate(self.places) if place.task.type in roles]
        return sorted(held, key=lambda rank: self.places[rank].id)


def join_cluster(
    communicator: Communicator | None,
    resolver: ClusterResolver | None,
    validate: Callable[[TFConfig], None],
) -> Membership:
    """Compare all ranks' clusters and tasks, and split the ranks by what they do. Collective.

    The cluster comes from the resolver, else from `TF_CONFIG`, else every rank is a worker. Raises
    the same ValueError on every rank where they don't fit together, and what `validate` raises.
    """
    world = world_of(communicator)
    with PropagatedErrors(world, "cluster_resolver"):
        if not (resolver is None or isinstance(resolver, ClusterResolver)):
            given = "class" if isinstance(resolver, type) else type(resolver).__name__
            raise TypeError(
                f"cluster_resolver is a {given}: must be a ClusterResolver of strategies, or None"
            )
        text = os.environ.get("TF_CONFIG") if resolver is None else resolver.tf_config().to_text()
    with raising_on_all(world.rank):
        places = assign_ranks(world.all_gather_object((text, socket.gethostname())))
        validate(TFConfig(places[0].cluster, places[0].task.type, places[0].task.index))
    place = places[world.rank]
    group = world.split(_GROUPS.get(place.task.type, 0), key=place.id)
    assert group is not None
    if resolver is None:
        task = place.task
        resolver = SimpleClusterResolver(place.cluster, task_type=task.type, task_id=task.index)
    return Membership(world, group, places, resolver)
