"""MultiWorkerMirroredStrategy: synchronous training, a copy of every variable on every rank."""

from __future__ import annotations

from collectives import Communicator
from strategies.base.strategy import Strategy
from strategies.cluster.membership import join_cluster
from strategies.cluster.resolvers import ClusterResolver
from strategies.cluster.tf_config import validate_for_collective_training
from strategies.communication.with_options import agreed_options
from strategies.core.communication_options import CommunicationOptions
from strategies.core.world import world_of


class MultiWorkerMirroredStrategy(Strategy):
    """Variables are mirrored on all ranks, gradients summed over them, updates identical.

    As `tf.distribute.MultiWorkerMirroredStrategy`, started by mpirun. The cluster comes from
    `cluster_resolver`, else from `TF_CONFIG`, else every rank is a worker. All ranks compare
    theirs: they must name the same cluster and each task exactly once, or the same ValueError is
    raised on every rank. Replicas are numbered chief first, then workers by index, whatever order
    mpirun started them in. Evaluators form a group of their own, as they do in TensorFlow: where
    the program doesn't branch on `cluster_resolver.task_type`, an evaluator trains for itself, and
    is the chief of its group (see `train_and_evaluate`). Making one is collective.

    communication_options: the algorithm, message size and timeout of reductions and gathers
    (`CommunicationOptions`). They must be equal on all ranks, or the same ValueError
    is raised on every rank. NCCL is AUTO on all ranks where one of them lacks it; rank 0 logs
    that.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        world = world_of(communicator)
        options = agreed_options(world, communication_options)
        self.membership = join_cluster(world, cluster_resolver, validate_for_collective_training)
        super().__init__(
            self.membership.group,
            cluster_resolver=self.membership.resolver,
            is_chief=self.membership.place.is_chief,
            communication_options=options,
        )
        if options.timeout_seconds is not None:
            self.communicator.deadline = options.timeout_seconds or None
