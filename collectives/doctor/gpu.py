"""GPUs, the software for them, and the path that arrays on them would take."""

from __future__ import annotations

import re
from ctypes.util import find_library
from functools import partial
from pathlib import Path
from typing import Any

from collectives.doctor.gpu_findings import GpuFindings, find_in_subprocess
from collectives.doctor.packages import found_version, installed
from collectives.doctor.report import Report
from collectives.gpu.bootstrap import judge
from collectives.transports.mpi_cuda import cuda_aware

_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_INSTALL = "not installed: pip install 'mpi-collectives[cuda12]' (or [cuda13])"
_DRIVER = Path("/proc/driver/nvidia/version")


def report_gpu(report: Report) -> GpuFindings:
    """Report the software for arrays on GPUs, and what this process finds.

    CuPy, if installed, is imported in another process.
    """
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
    verdict = judge(healths)
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
