"""What CuPy finds on this machine, looked at in a process of its own.

To import CuPy takes a second, and a broken one may end the process. `python -m` this module prints
what it found as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from collectives.cuda.runtime import cuda
from collectives.gpu import probe
from collectives.gpu.bootstrap import Health, examine

_LIMIT_SECONDS = 60
_MODULE = "collectives.doctor.gpu_look"


@dataclass
class Look:
    """What was found; a problem for what wasn't."""

    problem: str | None = None
    """Why no GPU can be used."""
    gpus: list[str] = field(default_factory=list)
    nccl: str = ""
    nvrtc: str | None = None
    """The version of CUDA's compiler; None where it can't be loaded."""
    healths: list[dict[str, Any]] = field(default_factory=list)
    """What a rank would tell the others, with each of the GPUs."""

    def health(self, number: int) -> Health:
        """What a rank of that number on its node has."""
        if not self.healths:
            return Health(self.problem)
        return Health(**self.healths[number % len(self.healths)])


def look_elsewhere(limit: float = _LIMIT_SECONDS) -> Look:
    """`look`, in another process."""
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", _MODULE],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        return Look(**json.loads(ended.stdout))
    except subprocess.TimeoutExpired:
        return Look(f"CuPy did not import within {limit:g} s")
    except (ValueError, TypeError):
        lines = ended.stderr.strip().splitlines() or [f"its process ended with {ended.returncode}"]
        return Look(f"CuPy can't be used: {lines[-1]}")


def look() -> Look:
    """What this process has. Raises what CuPy raises where it is broken."""
    gpus, driver = cuda(), probe.nccl_driver()
    missing = driver.problem()
    nccl = missing or shown(driver.version())
    problem = gpus.problem()
    if problem is not None:
        return Look(problem, [], nccl, _nvrtc())
    numbers = range(gpus.device_count())
    healths = [asdict(examine(gpus, driver, number)) for number in numbers]
    return Look(None, [_name(number) for number in numbers], nccl, _nvrtc(), healths)


def shown(version: int) -> str:
    """NCCL's number as people write it: 22809 is 2.28.9."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _name(number: int) -> str:
    import cupy

    name: str = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
    return name


def _nvrtc() -> str | None:
    from cupy.cuda import nvrtc

    try:
        return ".".join(map(str, nvrtc.getVersion()))
    except Exception:  # of whatever kind CuPy's loader of libraries raises
        return None


if __name__ == "__main__":
    print(json.dumps(asdict(look())))
