"""What this process has for arrays on GPUs, as far as it can see alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives.cuda.interface import Cuda
from collectives.cuda.runtime import cuda
from collectives.errors import BackendUnavailableError
from collectives.gpu.bootstrap import Health, examine
from collectives.transports.nccl_driver import NcclDriver


class Found(NamedTuple):
    """What a rank uses."""

    cuda: Cuda
    driver: NcclDriver
    device: int


def nccl_driver() -> NcclDriver:
    """NCCL, through CuPy. BackendUnavailableError where CuPy isn't installed."""
    cuda()
    from collectives.transports.cupy_nccl import CupyNccl

    return CupyNccl()


def look(choose: Callable[[Cuda], int]) -> tuple[Found | None, Health]:
    """What there is; `choose` names the GPU. None where there is no GPU."""
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
        # Whatever it is, the other ranks must hear of it.
        return None, Health(f"{type(error).__name__}: {error}")


def nccl_problem() -> str | None:
    """Why this process can't use NCCL; None where it can."""
    _, health = look(lambda gpus: gpus.current_device())
    return health.problem or health.nccl_problem
