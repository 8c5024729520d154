"""Programs on several hosts, which are network namespaces of one machine."""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from bench.hosts.namespaces import hosts, launch_line, namespace_of, why_not
from collectives.shm.node_barrier import is_alive
from tests.worlds.launcher import find_mpirun
from tests.worlds.programs import launched, run_launcher

__all__ = ["Job", "hosts", "job_on_hosts", "namespace_of", "run_on_hosts", "set_link", "why_not"]

_POLL_SECONDS = 0.005


def run_on_hosts(addresses, agent, ranks, program, *, timeout):
    """Run a Python program on `ranks[i]` ranks of host i."""
    line, environment = launch_line(find_mpirun(), agent, addresses, ranks)
    return run_launcher([*line, sys.executable, "-c", program], environment, timeout=timeout)


def set_link(agent, address, state):
    """Set a host's only link "up" or "down"."""
    link = ("ip", "-n", namespace_of(agent, address), "link", "set", "eth0", state)
    subprocess.run(link, check=True, capture_output=True)


class Job:
    """A program that runs on hosts: its ranks write marks, files of the directory $MARKS.

    The first mark of every rank is "ready", with its process.
    """

    def __init__(self, process, directory, size):
        self.process, self._directory, self.ranks = process, directory, range(size)
        ready = self.marks("ready", self.ranks)
        self.processes = {rank: ready[rank]["process"] for rank in self.ranks}

    def marks(self, name, ranks, seconds=30):
        """The content of a mark of each of these ranks, once all have written it."""
        paths = {rank: self._directory / f"{name}.{rank}" for rank in ranks}
        end = time.monotonic() + seconds
        while missing := [rank for rank, path in paths.items() if not path.exists()]:
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(f"no mark {name!r} of ranks {missing}: {self.errors()}")
            time.sleep(_POLL_SECONDS)
        return {rank: json.loads(path.read_text()) for rank, path in paths.items()}

    def tell(self, name):
        """Create the file of that name, for which the ranks wait."""
        (self._directory / name).touch()

    def errors(self):
        """What mpirun and the ranks have written to stderr."""
        return (self._directory / "stderr").read_text(errors="replace")

    def wait_until_ended(self, seconds):
        """Return the ranks whose processes are still alive then."""
        end = time.monotonic() + seconds
        while alive := [rank for rank in self.ranks if is_alive(self.processes[rank])]:
            if time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        return alive


@contextmanager
def job_on_hosts(addresses, agent, ranks, program):
    """Start a Python program on `ranks[i]` ranks of host i, which ends with the context."""
    line, environment = launch_line(find_mpirun(), agent, addresses, ranks)
    line += [sys.executable, "-c", program]
    with tempfile.TemporaryDirectory() as directory:
        environment |= {"MARKS": directory, "COLLECTIVES_RECORD_DIRECTORY": directory}
        with (
            (Path(directory) / "stderr").open("w") as errors,
            launched(line, environment, stdout=subprocess.DEVNULL, stderr=errors) as process,
        ):
            yield Job(process, Path(directory), sum(ranks))
