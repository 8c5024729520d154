"""Programs on several hosts, which are network namespaces of one machine."""

import sys

from bench.hosts.namespaces import hosts, launch_line, namespace_of, why_not
from tests.worlds.launcher import find_mpirun
from tests.worlds.programs import run_launcher

__all__ = ["hosts", "namespace_of", "run_on_hosts", "why_not"]


def run_on_hosts(addresses, agent, ranks, program, *, timeout):
    """Run a Python program on `ranks[i]` ranks of host i."""
    line, environment = launch_line(find_mpirun(), agent, addresses, ranks)
    return run_launcher([*line, sys.executable, "-c", program], environment, timeout=timeout)
