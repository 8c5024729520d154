"""Detection of each rank's GPU and NCCL, and what all ranks can therefore do together.

Every rank publishes what it has before any rank calls NCCL, so that no rank waits in NCCL for a
rank that can't start. All ranks derive the same result: NCCL, or the same reason why there is none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from collectives.cuda.interface import Cuda
from collectives.cuda.runtime import cuda
from collectives.errors import BackendUnavailableError
from collectives.transports.nccl_driver import NcclDriver

# From this version on, NCCL permits ranks to share a GPU if the variable is 1.
_SHARING_VERSION, _SHARING_VARIABLE = 23000, "NCCL_MULTI_RANK_GPU_ENABLE"
_FLOAT8_VERSION, _FLOAT8_CAPABILITY = 22400, (9, 0)


@dataclass(frozen=True)
class Health:
    """What a rank has: its GPU, and NCCL."""

    problem: str | None
    """Why it has no GPU or no CuPy; None if it has both."""
    nccl_problem: str | None = None
    host: str = ""
    gpu: str = ""
    """The GPU's UUID."""
    version: int = 0
    float8: bool = False
    may_share: bool = False
    """Whether this rank's NCCL permits several ranks on a GPU."""


@dataclass(frozen=True)
class Verdict:
    """What all ranks can do together, derived from all ranks' health."""

    problem: str | None
    """Why there can be no NCCL communicator; None if there can be one."""
    float8: bool = False
    one_gpu: bool = False
    """Whether all ranks use the same GPU."""
    gpus: bool = True
    """Whether all ranks have a GPU."""


class Found(NamedTuple):
    """What a rank uses for device arrays."""

    cuda: Cuda
    driver: NcclDriver
    device: int


def nccl_driver() -> NcclDriver:
    """NCCL through CuPy; BackendUnavailableError if CuPy is not installed."""
    cuda()
    return NcclDriver()


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


def examine(gpus: Cuda, driver: NcclDriver, device: int) -> Health:
    """This rank's health with the given GPU, which exists."""
    host, gpu = socket.gethostname(), gpus.uuid(device)
    missing = driver.problem()
    if missing is not None:
        return Health(None, missing, host, gpu)
    version = driver.version()
    float8 = version >= _FLOAT8_VERSION and gpus.capability(device) >= _FLOAT8_CAPABILITY
    may_share = version >= _SHARING_VERSION and os.environ.get(_SHARING_VARIABLE) == "1"
    return Health(None, None, host, gpu, version, float8, may_share)


def judge(healths: list[Health]) -> Verdict:
    """What ranks of this health can do together."""
    for rank, health in enumerate(healths):
        if health.problem is not None:
            return Verdict(f"rank {rank}: {health.problem}", gpus=False)
    gpus = [(health.host, health.gpu) for health in healths]
    one_gpu = len(set(gpus)) == 1 and len(gpus) > 1
    problem = _nccl_problem(healths, gpus)
    return Verdict(problem, all(health.float8 for health in healths), one_gpu)


def _nccl_problem(healths: list[Health], gpus: list[tuple[str, str]]) -> str | None:
    for rank, health in enumerate(healths):
        if health.nccl_problem is not None:
            return f"rank {rank}: {health.nccl_problem}"
        if health.version != healths[0].version:
            return (
                f"rank 0 has NCCL {version_text(healths[0].version)}, rank {rank}"
                f" {version_text(health.version)}: all must have the same"
            )
        first = gpus.index(gpus[rank])
        if first != rank and not (health.may_share and healths[first].may_share):
            return (
                f"ranks {first} and {rank} share the GPU {health.gpu} of {health.host}, and NCCL"
                f" requires one for each (or, from 2.30 on, {_SHARING_VARIABLE}=1)"
            )
    return None


def version_text(version: int) -> str:
    """NCCL's version as text: 22809 is 2.28.9."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
