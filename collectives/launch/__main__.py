"""The ranks that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from collectives.errors import LaunchError
from collectives.launch.command import main
from collectives.launch.tasks import Tasks
from collectives.launching.launcher import find_torch_launch, torch_variables_refused


def find_tasks(environment: Mapping[str, str]) -> Tasks:
    """The ranks according to the variables; LaunchError if they are incomplete or wrong."""
    launch = find_torch_launch(environment)
    if launch is None:
        raise torch_variables_refused(environment)
    if launch.agent_store:
        raise LaunchError(
            f"torchrun serves {launch.host}:{launch.port} itself; let it start the program directly"
        )
    first = f"rank 0 ({launch.host}:{launch.port})"
    names = (first, *(f"rank {rank}" for rank in range(1, launch.size)))
    size = f"WORLD_SIZE={launch.size}"
    return Tasks(launch.rank, names, launch.host, launch.port, size, refuses_late=False)


if __name__ == "__main__":
    sys.exit(main("collectives.launch", find_tasks, os.environ))
