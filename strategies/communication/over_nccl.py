"""Arrays of the host reduced by NCCL, on the ranks' GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from collectives import Communicator, ReduceOp
from collectives.cuda.runtime import cuda, fetched, filled
from collectives.gpu import probe
from collectives.gpu.probe import Health, examine, judge
from strategies.core.values import Array
from strategies.core.world import nccl_problem


class OverNccl:
    """The NCCL of ranks each of which has a GPU of its own."""

    def __init__(self, device: int) -> None:
        """`device` is the number of this rank's GPU."""
        self._device = device

    def all_reduce(self, communicator: Communicator, pack: Array, op: ReduceOp | str) -> None:
        """Reduce a contiguous array in place: to the GPU, there, and back. Collective."""
        elements = pack.reshape(-1)
        with self._on_device():
            copy = cuda().empty(elements.size, elements.dtype)
            filled(copy, elements)
            # Waiting for a handle raises where another rank fails; waiting for the GPU would not.
            communicator.all_reduce_async(copy, op, out=copy).wait()
            elements[...] = fetched(copy)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Use this device, and restore the caller's current GPU, which is one for each thread."""
        gpus = cuda()
        before = gpus.current_device()
        gpus.use_device(self._device)
        try:
            yield
        finally:
            gpus.use_device(before)


def find_nccl(communicator: Communicator) -> OverNccl | str:
    """NCCL, or why the ranks have none in common, the same on every rank. Collective.

    Each rank takes its current GPU, if no two ranks have the same one; else the one that has its
    number on its node. Raises a MismatchError on every rank where some make another call.
    """
    communicator.barrier("looking for NCCL")
    devices, healths = _candidates(communicator.local_rank)
    reports = communicator.all_gather_object(healths)
    problem = ""
    for choice, device in enumerate(devices):
        verdict = judge([report[choice] for report in reports])
        if verdict.problem is None:
            return OverNccl(device)
        problem = verdict.problem
    return problem


def _candidates(local_rank: int) -> tuple[list[int], list[Health]]:
    """The GPUs that this rank may use, and the health of each."""
    problem = nccl_problem()
    if problem is not None:
        return [-1, -1], [Health(problem)] * 2
    gpus, driver = cuda(), probe.nccl_driver()
    devices = [gpus.current_device(), local_rank % gpus.device_count()]
    return devices, [examine(gpus, driver, device) for device in devices]
