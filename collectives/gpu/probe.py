"""Detection of the GPU and NCCL of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives.cuda.interface import Cuda
from collectives.cuda.runtime import cuda
from collectives.errors import BackendUnavailableError
from collectives.gpu.bootstrap import Health, examine
from collectives.transports.nccl_driver import NcclDriver


class Found(NamedTuple):
    """What a rank uses for device arrays."""

    cuda: Cuda
    driver: NcclDriver
    device: int


def nccl_driver() -> NcclDriver:
    """NCCL through CuPy; BackendUnavailableError if CuPy is not installed."""
    cuda()
    from collectives.transports.cupy_nccl import CupyNccl

    return CupyNccl()


def find_gpu(choose: Callable[[Cuda], int]) -> tuple[Found | None, Health]:
    """The GPU selected by `choose`, or None if there is none; and this rank's health."""
    try:
        gpus, driver = cuda(), nccl_driver()
        problem = gpus.problem()
        if problem is not None:
            return None, Health(problem)
        device = choose(gpus)
        return Found(gpus, driver, device), examine(gpus, driver, device)
    except BackendUnavailableError as error:
        return None, Health(str(error))
    except Exception as error:
        # Any error must be reported to the other ranks.
        return None, Health(f"{type(error).__name__}: {error}")


def nccl_problem() -> str | None:
    """Why this process can't use NCCL; None if it can."""
    _, health = find_gpu(lambda gpus: gpus.current_device())
    return health.problem or health.nccl_problem
