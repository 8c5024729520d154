"""MirroredStrategy: synchronous training on one node, a copy of every variable on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives import BackendUnavailableError, Communicator
from strategies.base.strategy import Strategy
from strategies.core.device_names import gpu_problem, parse_devices, use_gpu
from strategies.core.same_error import call_on_all, refuse_differences
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
        given = f"devices={devices!r}, cross_device_ops={cross_device_ops!r}"
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
    try:
        parsed = parse_devices(devices)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{given}: {error}") from None
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
