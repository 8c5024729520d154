"""MirroredStrategy: synchronous training on one node, a copy of every variable on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives import BackendUnavailableError, Communicator
from collectives.consistency.uncaught import raising_on_all
from strategies.base.strategy import Strategy
from strategies.core.device_names import gpu_problem, parse_devices, use_gpu
from strategies.core.world import world_of
from strategies.cross_device_ops.base import CrossDeviceOps


class MirroredStrategy(Strategy):
    """Variables are mirrored on the ranks of one node, gradients summed, updates identical.

    As `tf.distribute.MirroredStrategy`, started by `mpirun -n` with one rank per device. Making one
    is collective; all ranks give equal arguments.

    devices: the name of a device ("CPU:0", "/gpu:1"), or a list with one for each rank, in rank
    order; the CPU without. A GPU becomes its rank's current one; variables stay on the host.
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
        with raising_on_all(world.rank):
            _refuse_several_nodes(world)
            named = _agreed_devices(world, devices, cross_device_ops)
        own = world.split(0, key=world.rank)
        assert own is not None
        super().__init__(own, cross_device_ops=cross_device_ops)
        if named is not None:
            kind, number = named[own.rank]
            self.device = f"/device:{kind}:{number}"
            if kind == "GPU":
                use_gpu(number)


def _refuse_several_nodes(world: Communicator) -> None:
    if world.nodes > 1:
        raise ValueError(
            f"MirroredStrategy is for the ranks of one node, but the {world.size} ranks are on"
            f" {world.nodes} nodes: use MultiWorkerMirroredStrategy"
        )


def _agreed_devices(world: Communicator, devices: Any, ops: Any) -> list[tuple[str, int]] | None:
    """The devices' kinds and numbers, checked alike on every rank. Collective."""
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
    _check_gpus(world, parsed, devices)
    if len(parsed) != world.size:
        raise ValueError(
            f"MirroredStrategy: devices={devices!r} has {len(parsed)} of them for {world.size}"
            " ranks: must be one for each; start as many ranks by `mpirun -n`"
        )
    return parsed


def _check_gpus(world: Communicator, parsed: list[tuple[str, int]], devices: Any) -> None:
    """BackendUnavailableError on every rank where any lacks its GPU. Collective."""
    if all(kind == "CPU" for kind, _ in parsed):
        return
    kind, number = parsed[world.rank] if world.rank < len(parsed) else parsed[0]
    problems = world.all_gather_object(gpu_problem(number if kind == "GPU" else 0))
    if any(problems):
        raise BackendUnavailableError(
            f"MirroredStrategy: devices={devices!r} has a GPU; leave it out for the CPU."
            f" {next(filter(None, problems))}"
        )


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
