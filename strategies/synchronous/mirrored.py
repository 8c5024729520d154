"""Synchronous training with a copy of every variable on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives import BackendUnavailableError, Communicator
from strategies.base.membership import join_cluster
from strategies.base.strategy import Strategy
from strategies.cluster.tf_config import validate_for_collective_training
from strategies.cluster_resolver import ClusterResolver
from strategies.communication.with_options import agreed_options
from strategies.core.options import CommunicationOptions
from strategies.core.same_error import call_on_all, refuse_differences
from strategies.core.world import gpu_problem, parse_devices, use_gpu, world_of
from strategies.cross_device_ops.base import CrossDeviceOps


class MirroredStrategy(Strategy):
    """Variables are mirrored on the ranks of one node, gradients summed, updates identical.

    As `tf.distribute.MirroredStrategy`, started by `mpirun -n` with one rank per device. Making one
    is collective; all ranks give equal arguments.

    devices: the name of a device ("CPU:0", "/gpu:1"), or a list with one for each rank, in rank
    order; None: the CPU. A GPU becomes the current one of its rank. A variable lies where its
    initial value does.
    cross_device_ops: how values are reduced: `RingAllReduce`, `HierarchicalCopyAllReduce`,
    `ReductionToOneDevice`, `NcclAllReduce`, or a subclass of `CrossDeviceOps`; `collectives`
    chooses without.

    Raises on every rank alike ValueError where the ranks are on several nodes (use
    MultiWorkerMirroredStrategy), their arguments differ, or devices aren't one for each rank;
    BackendUnavailableError where a GPU is asked for and there is none.
    """

    def __init__(
        self,
        devices: str | Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        world = world_of(communicator)
        ops = cross_device_ops
        # Another object's own text may differ by its address.
        shown = ops if isinstance(ops, CrossDeviceOps) else ops and type(ops).__name__
        given = f"devices={devices!r}, cross_device_ops={shown!r}"
        refuse_differences(world, "MirroredStrategy: the ranks' arguments differ", given)
        named = call_on_all(
            world, "MirroredStrategy", lambda: _checked(world, devices, cross_device_ops)
        )
        own = world.split(0, key=world.rank)
        assert own is not None
        super().__init__(own, cross_device_ops=cross_device_ops)
        if named is not None:
            kind, number = named[own.rank]
            self.device = f"/device:{kind}:{number}"
            if kind == "GPU":
                use_gpu(number)


def _checked(world: Communicator, devices: Any, ops: Any) -> list[tuple[str, int]] | None:
    """The kind and number of each rank's device, or this rank's error."""
    if world.nodes > 1:
        raise ValueError(
            f"MirroredStrategy is for the ranks of one node, but the {world.size} ranks are on"
            f" {world.nodes} nodes: use MultiWorkerMirroredStrategy"
        )
    if ops is not None and not isinstance(ops, CrossDeviceOps):
        raise ValueError(f"MirroredStrategy: cross_device_ops={ops!r}: must be a CrossDeviceOps")
    if devices is None:
        return None
    given = f"MirroredStrategy: devices={devices!r}"
    parsed = parse_devices(devices, given)
    gpus = [device for device in parsed if device[0] == "GPU"]
    if len(set(gpus)) != len(gpus):
        raise ValueError(f"{given}: a GPU is there twice")
    if gpus:
        kind, number = parsed[world.rank] if world.rank < len(parsed) else parsed[0]
        problem = gpu_problem(number if kind == "GPU" else 0)
        if problem is not None:
            raise BackendUnavailableError(f"{given} has a GPU; leave it out for the CPU. {problem}")
    if len(parsed) != world.size:
        raise ValueError(
            f"{given} has {len(parsed)} of them for {world.size} ranks: must be one for each; start"
            " as many ranks by `mpirun -n`"
        )
    return parsed


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
