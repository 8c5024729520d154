"""MultiWorkerMirroredStrategy: synchronous training, a copy of every variable on every rank."""

from __future__ import annotations

import os
import socket

import collectives
from collectives import Communicator
from strategies.cluster_resolver import ClusterResolver, SimpleClusterResolver
from strategies.ranks import RankPlace, assign_ranks
from strategies.strategy import Strategy
from strategies.tf_config import TFConfig, validate_for_collective_training


class MultiWorkerMirroredStrategy(Strategy):
    """Variables are mirrored on all ranks, gradients summed over them, updates identical.

    As `tf.distribute.MultiWorkerMirroredStrategy`, started by mpirun. The cluster comes from
    `cluster_resolver`, else from `TF_CONFIG`, else every rank is a worker. All ranks compare
    theirs: they must name the same cluster and each task exactly once, or the same ValueError is
    raised on every rank. Replicas are numbered chief first, then workers by index, whatever order
    mpirun started them in. Evaluators form a group of their own. Making one is collective.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        world = collectives.world() if communicator is None else communicator
        place = _agreed_place(world, cluster_resolver)
        group = world.split(_GROUPS.get(place.role, 0), key=place.key)
        assert group is not None
        if cluster_resolver is None:
            cluster_resolver = SimpleClusterResolver(
                place.cluster, task_type=place.task.type, task_id=place.task.index
            )
        super().__init__(group, cluster_resolver=cluster_resolver, is_chief=place.is_chief)


# Ranks of different groups train, evaluate or feed data apart from each other.
_GROUPS = {"chief": 0, "worker": 0, "evaluator": 1, "data": 2}


def _agreed_place(world: Communicator, resolver: ClusterResolver | None) -> RankPlace:
    """This rank's task, the same table of tasks being found on every rank."""
    text = os.environ.get("TF_CONFIG") if resolver is None else resolver.tf_config().to_text()
    reports = world.all_gather_object((text, socket.gethostname()))
    places = assign_ranks(reports)
    validate_for_collective_training(TFConfig(places[0].cluster, places[0].task))
    return places[world.rank]
