"""MirroredStrategy: synchronous training on one node, a copy of every variable on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import collectives
from collectives import BackendUnavailableError, Communicator
from strategies.cross_device_ops.base import CrossDeviceOps
from strategies.devices import nccl_problem, parse_devices
from strategies.strategy import Strategy


class MirroredStrategy(Strategy):
    """Variables are mirrored on the ranks of one node, gradients summed, updates identical.

    As `tf.distribute.MirroredStrategy`, started by `mpirun -n` with one rank per device. Making one
    is collective; all ranks give equal arguments.

    devices: the name of a device ("CPU:0", "/gpu:1"), or a list with one for each rank, in rank
    order; the CPU without. cross_device_ops: how values are reduced: `RingAllReduce`,
    `HierarchicalCopyAllReduce`, `ReductionToOneDevice`, `NcclAllReduce`, or a subclass of
    `CrossDeviceOps`; `collectives` chooses without.

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
        world = collectives.world() if communicator is None else communicator
        _refuse_several_nodes(world)
        names = _agreed_names(world, devices, cross_device_ops)
        own = world.split(0, key=world.rank)
        assert own is not None
        super().__init__(own, cross_device_ops=cross_device_ops)
        if names is not None:
            self.device = names[own.rank]


def _refuse_several_nodes(world: Communicator) -> None:
    if world.nodes > 1:
        raise ValueError(
            f"MirroredStrategy is for the ranks of one node, but the {world.size} ranks are on"
            f" {world.nodes} nodes: use MultiWorkerMirroredStrategy"
        )


def _agreed_names(world: Communicator, devices: Any, ops: Any) -> list[str] | None:
    """The devices' full names, checked alike on every rank. Collective."""
    reports = world.all_gather_object((_told(devices, ops), _problem(world, devices, ops)))
    lines = [f"  rank {rank}: {problem or told}" for rank, (told, problem) in enumerate(reports)]
    if len({told for told, _ in reports}) > 1:
        raise ValueError("\n".join(["MirroredStrategy: the ranks' arguments differ", *lines]))
    problems = [problem for _, problem in reports if problem]
    if problems:
        raise ValueError(f"MirroredStrategy: {problems[0]}")
    if devices is None:
        return None
    parsed = parse_devices(devices)
    lacking = world.all_gather_object(nccl_problem())
    if any(kind == "GPU" for kind, _ in parsed) and any(lacking):
        raise BackendUnavailableError(
            f"MirroredStrategy: devices={devices!r} has a GPU; leave it out for the CPU."
            f" {next(filter(None, lacking))}"
        )
    if len(parsed) != world.size:
        raise ValueError(
            f"MirroredStrategy: devices={devices!r} has {len(parsed)} of them for {world.size}"
            " ranks: must be one for each; start as many ranks by `mpirun -n`"
        )
    return [f"/device:{kind}:{number}" for kind, number in parsed]


def _told(devices: Any, ops: Any) -> str:
    return f"devices={devices!r}, cross_device_ops={ops!r}"


def _problem(world: Communicator, devices: Any, ops: Any) -> str | None:
    """What this rank's arguments have that no devices or ops are."""
    if ops is not None and not isinstance(ops, CrossDeviceOps):
        return f"cross_device_ops={ops!r}: must be a CrossDeviceOps"
    if devices is None:
        return None
    try:
        names = parse_devices(devices)
    except (TypeError, ValueError) as error:
        return f"devices={devices!r}: {error}"
    gpus = [name for name in names if name[0] == "GPU"]
    if len(set(gpus)) != len(gpus):
        return f"devices={devices!r}: a GPU is there twice"
    return None
