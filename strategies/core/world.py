"""What a strategy runs on: the communicator of its ranks, and devices by their names.

Devices have TensorFlow's names: `CPU:0`, `/gpu:1`, `/job:worker/task:0/device:…`.
"""

from __future__ import annotations

import re
from typing import Any

import collectives
from collectives import Communicator
from collectives.cuda.runtime import cuda
from collectives.gpu import probe


def world_of(communicator: Any) -> Communicator:
    """The communicator itself; None: that of all ranks.

    Raises TypeError for anything else. One of mpi4py isn't wrapped, since the duplicate would have
    to be closed by the caller.
    """
    if communicator is None:
        return collectives.world()
    if isinstance(communicator, Communicator):
        return communicator
    kind = type(communicator)
    text = f"communicator is a {kind.__module__}.{kind.__qualname__}: must be a"
    if kind.__module__.partition(".")[0] == "mpi4py":
        raise TypeError(f"{text} collectives.Communicator; make one by Communicator(comm)")
    raise TypeError(f"{text} collectives.Communicator, or None for that of all ranks")


_NAME = re.compile(r"(?:/?(?:job|replica|task):\w+)*/?(?:device:)?(cpu|gpu):(\d+)", re.IGNORECASE)


def parse_device(name: Any) -> tuple[str, int]:
    """The kind, "CPU" or "GPU", and the number; ValueError for anything else than a device."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"device {name!r}: must be a name such as 'CPU:0' or '/gpu:1'")
    return match[1].upper(), int(match[2])


def parse_devices(names: Any, where: str) -> list[tuple[str, int]]:
    """As `parse_device`, of one name or several; ValueErrors begin with `where` they stand."""
    try:
        return [parse_device(name) for name in ([names] if isinstance(names, str) else names)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def nccl_problem() -> str | None:
    """Why NCCL can't be used in this process, and what to do; None where it can."""
    problem = probe.nccl_problem()
    return None if problem is None else f"NCCL can't be used here: {problem}"


def gpu_problem(number: int) -> str | None:
    """Why this process can't use the GPU of that number, and what to do; None where it can."""
    problem = nccl_problem()
    if problem is not None:
        return problem
    count = cuda().device_count()
    return None if number < count else f"there is no GPU {number}: this process sees {count}"


def use_gpu(number: int) -> None:
    """Make it this thread's current GPU, on which CuPy makes new arrays."""
    cuda().use_device(number)
