"""Starting NCCL so that no rank waits in it for one that can't start.

Every rank tells the others what it has, before any of them calls NCCL, and all come to the same:
a communicator, or the same reason why there is none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from collectives.cuda.interface import Cuda
from collectives.transports.nccl import NcclTransport
from collectives.transports.nccl_driver import NcclDriver

# NCCL lets ranks share a GPU from here on, where this variable allows it.
_SHARING_VERSION, _SHARING_VARIABLE = 23000, "NCCL_MULTI_RANK_GPU_ENABLE"
_FLOAT8_VERSION, _FLOAT8_CAPABILITY = 22400, (9, 0)


@dataclass(frozen=True)
class Health:
    """What a rank has."""

    problem: str | None
    """Why it has no GPU or no CuPy."""
    nccl_problem: str | None = None
    host: str = ""
    gpu: str = ""
    """The GPU's UUID."""
    version: int = 0
    float8: bool = False
    may_share: bool = False
    """Whether this rank's NCCL lets several ranks share a GPU."""


@dataclass(frozen=True)
class Verdict:
    """What all ranks came to, from all ranks' health."""

    problem: str | None
    """Why there is no communicator of NCCL; None where there can be one."""
    float8: bool = False
    one_gpu: bool = False
    """Whether all ranks share one GPU."""
    gpus: bool = True
    """Whether all ranks have one."""


def examine(cuda: Cuda, driver: NcclDriver, device: int) -> Health:
    """This rank's health, with that GPU, which it has."""
    host, gpu = socket.gethostname(), cuda.uuid(device)
    missing = driver.problem()
    if missing is not None:
        return Health(None, missing, host, gpu)
    version = driver.version()
    float8 = version >= _FLOAT8_VERSION and cuda.capability(device) >= _FLOAT8_CAPABILITY
    may_share = version >= _SHARING_VERSION and os.environ.get(_SHARING_VARIABLE) == "1"
    return Health(None, None, host, gpu, version, float8, may_share)


def judge(healths: list[Health]) -> Verdict:
    """What ranks of this health can do together."""
    for rank, health in enumerate(healths):
        if health.problem is not None:
            return Verdict(f"rank {rank}: {health.problem}", gpus=False)
    places = [(health.host, health.gpu) for health in healths]
    one_gpu = len(set(places)) == 1 and len(places) > 1
    problem = _nccl_problem(healths, places)
    return Verdict(problem, all(health.float8 for health in healths), one_gpu)


def _nccl_problem(healths: list[Health], places: list[tuple[str, str]]) -> str | None:
    for rank, health in enumerate(healths):
        if health.nccl_problem is not None:
            return f"rank {rank}: {health.nccl_problem}"
        if health.version != healths[0].version:
            return (
                f"rank 0 has NCCL {_shown(healths[0].version)}, rank {rank}"
                f" {_shown(health.version)}: all must have the same"
            )
        first = places.index(places[rank])
        if first != rank and not (health.may_share and healths[first].may_share):
            return (
                f"ranks {first} and {rank} share the GPU {health.gpu} of {health.host}, and NCCL"
                f" wants one for each (or, from 2.30 on, {_SHARING_VARIABLE}=1)"
            )
    return None


def _shown(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def connect(
    driver: NcclDriver,
    rank: int,
    size: int,
    *,
    broadcast: Callable[[Callable[[], bytes] | None], bytes],
    on_all: Callable[[Callable[[], None]], object],
    address: Callable[[object], int],
    stream: int,
    float8: bool,
) -> NcclTransport:
    """The communicator of all ranks, on the current GPU. Collective.

    `broadcast` gives every rank what rank 0's function returns, or raises; `on_all` calls a
    function on every rank, and raises on all of them what any raises.
    """
    unique_id = broadcast(driver.unique_id if rank == 0 else None)
    made: list[object] = []

    def make() -> None:
        made.append(driver.init_rank(size, unique_id, rank))

    try:
        on_all(make)
    except BaseException:
        for comm in made:
            # The others have none: to destroy it would wait for them.
            driver.abort(comm)
        raise
    return NcclTransport(driver, made[0], rank, size, address=address, stream=stream, float8=float8)
