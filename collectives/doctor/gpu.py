"""GPUs, the software for them, and the path that arrays on them would take.

CuPy is imported in a separate process, because the import takes a second and a broken CuPy may end
the process. `python -m` this module prints its findings as JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from ctypes.util import find_library
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from collectives.cuda.runtime import cuda
from collectives.doctor.packages import found_version, installed
from collectives.doctor.report import Report
from collectives.gpu import probe
from collectives.gpu.probe import Health
from collectives.transports.mpi_cuda import cuda_aware

_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_INSTALL = "not installed: pip install 'mpi-collectives[cuda12]' (or [cuda13])"
_DRIVER = Path("/proc/driver/nvidia/version")
_LIMIT_SECONDS = 60
_MODULE = "collectives.doctor.gpu"


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


def report_gpu(report: Report) -> GpuFindings:
    """Report the software for arrays on GPUs, and what another process finds with it."""
    report.section("GPU")
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    driver = _driver_version()
    report.row("NVIDIA devices", devices or "none")
    report.row("NVIDIA driver", driver or "none is loaded")
    cupy = found_version("cupy", _CUPY)
    report.row("cupy", cupy or _INSTALL)
    if cupy is None:
        report.row("NCCL", installed(*_NCCL) or find_library("nccl") or _INSTALL)
        return GpuFindings("CuPy is not installed")
    findings = find_in_subprocess()
    if findings.problem is not None:
        report.row("", _explained(findings.problem, driver))
    report.row("NCCL", findings.nccl or "not known")
    report.row("NVRTC", findings.nvrtc or "not found")
    if findings.nvrtc is None:
        add = report.warn if findings.gpus else partial(report.row, "")
        add(f"CuPy compiles its kernels with NVRTC: pip install '{_cupy_name()}[ctk]'")
    for number, name in enumerate(findings.gpus):
        report.row(f"GPU {number}", name)
    return findings


def report_device_arrays(report: Report, mpi: Any, findings: GpuFindings, local_rank: int) -> None:
    """Report the path of arrays on GPUs if each rank uses its own. Collective."""
    healths = mpi.COMM_WORLD.allgather(findings.health(local_rank))
    verdict = probe.judge(healths)
    report.section("Arrays on GPUs")
    if not verdict.gpus:
        report.row("would go over", "nothing: no GPU")
    elif verdict.problem is None:
        report.row("would go over", "NCCL")
    else:
        report.row("would go over", "CUDA IPC" if verdict.one_gpu else "the host's memory")
    if verdict.problem is not None:
        report.row("", verdict.problem)
    try:
        reads = "yes" if cuda_aware(mpi.COMM_WORLD) else "no"
    except ValueError as error:
        report.row("MPI", "not known whether this MPI reads GPU memory")
        report.warn(str(error))
    else:
        report.row("MPI", f"this MPI reads GPU memory: {reads} (it is not given any)")


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
    nccl = missing or probe.version_text(driver.version())
    problem = gpus.problem()
    if problem is not None:
        return GpuFindings(problem, [], nccl, _nvrtc())
    numbers = range(gpus.device_count())
    healths = [asdict(probe.examine(gpus, driver, number)) for number in numbers]
    return GpuFindings(None, [_name(number) for number in numbers], nccl, _nvrtc(), healths)


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


def _driver_version() -> str | None:
    """The version of the kernel module; None if it is not loaded."""
    try:
        content = _DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", content)
    return match[0] if match else "of unknown version"


def _explained(problem: str, driver: str | None) -> str:
    """The problem with advice. CUDA reports an insufficient driver also where there is none."""
    if driver is None:
        return f"{problem}; a container must be started with its GPUs"
    if "InsufficientDriver" in problem:
        return f"NVIDIA's driver {driver} is too old for this CuPy: install a newer one: {problem}"
    return problem


def _cupy_name() -> str:
    return next((name for name in _CUPY if installed(name)), _CUPY[0])


if __name__ == "__main__":
    print(json.dumps(asdict(find_gpus())))
