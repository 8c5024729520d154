"""What the environment says of who started this process, and of how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# In this order, since a launcher inside of a Slurm job hands Slurm's variables down. SLURM_NTASKS
# is the size of the allocation: it is set where nothing was started yet.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "SLURM_PROCID")


@dataclass(frozen=True)
class Launcher:
    """How many processes were started together, by which variable, and which one this is."""

    size: int
    rank: int
    variable: str

    @property
    def is_open_mpi(self) -> bool:
        """Whether it was Open MPI's mpirun."""
        return self.variable.startswith("OMPI_")


def find_launcher(environment: Mapping[str, str]) -> Launcher:
    """The launcher by its variables; a size of 1 where there are none."""
    variable, size = _first(environment, _SIZES, 1)
    return Launcher(size, _first(environment, _RANKS, 0)[1], variable)


def _first(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> tuple[str, int]:
    for name in names:
        if environment.get(name, "").isdigit():
            return name, int(environment[name])
    return "", default
