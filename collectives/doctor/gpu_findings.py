"""CuPy's findings on this machine, obtained in a separate process.

Importing CuPy takes a second, and a broken CuPy may end the process. `python -m` this module prints
the findings as JSON.
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
_MODULE = "collectives.doctor.gpu_findings"


@dataclass
class GpuFindings:
    """What was found, and the problem with what was not."""

    problem: str | None = None
    """Why no GPU can be used; None if one can."""
    gpus: list[str] = field(default_factory=list)
    nccl: str = ""
    nvrtc: str | None = None
    """The version of CUDA's compiler; None if it can't be loaded."""
    healths: list[dict[str, Any]] = field(default_factory=list)
    """The health of a rank with each of the GPUs."""

    def health(self, number: int) -> Health:
        """The health of the rank with that local rank."""
        if not self.healths:
            return Health(self.problem)
        return Health(**self.healths[number % len(self.healths)])


def find_in_subprocess(limit: float = _LIMIT_SECONDS) -> GpuFindings:
    """`find_gpus` in another process."""
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
        return GpuFindings(**json.loads(ended.stdout))
    except subprocess.TimeoutExpired:
        return GpuFindings(f"CuPy did not import within {limit:g} s")
    except (ValueError, TypeError):
        lines = ended.stderr.strip().splitlines() or [f"its process ended with {ended.returncode}"]
        return GpuFindings(f"CuPy can't be used: {lines[-1]}")


def find_gpus() -> GpuFindings:
    """The findings of this process. Raises CuPy's exceptions if it is broken."""
    gpus, driver = cuda(), probe.nccl_driver()
    missing = driver.problem()
    nccl = missing or shown(driver.version())
    problem = gpus.problem()
    if problem is not None:
        return GpuFindings(problem, [], nccl, _nvrtc())
    numbers = range(gpus.device_count())
    healths = [asdict(examine(gpus, driver, number)) for number in numbers]
    return GpuFindings(None, [_name(number) for number in numbers], nccl, _nvrtc(), healths)


def shown(version: int) -> str:
    """NCCL's version as text: 22809 is 2.28.9."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _name(number: int) -> str:
    import cupy

    name: str = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
    return name


def _nvrtc() -> str | None:
    from cupy.cuda import nvrtc

    try:
        return ".".join(map(str, nvrtc.getVersion()))
    except Exception:  # CuPy's loader of libraries raises various kinds
        return None


if __name__ == "__main__":
    print(json.dumps(asdict(find_gpus())))
