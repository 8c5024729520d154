"""Start examples as users do, and assign output lines to ranks."""

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from tests.worlds.launcher import NO_MPIRUN, find_mpirun, mpirun_command, run_world

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 120

# mpirun may join the lines that two ranks write at once: each writes to a file of its own.
APART = 'exec "$@" > "$SAID/${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-0}}"'


def example(name, *options):
    """The command of an example."""
    return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]


def on_ranks(size, command):
    """The command under mpirun; None: without it."""
    if size is None:
        return apart(command)
    if not (mpirun := find_mpirun()):
        pytest.fail(NO_MPIRUN, pytrace=False)
    return [*mpirun_command(mpirun, size), *apart(command)]


def apart(command):
    """The command, whose rank says what it says in a file of its own."""
    return ["sh", "-c", APART, "apart", *command] if command else []


def with_tasks(cluster, tasks, command):
    """The command under mpirun, once for each task, in order, with its TF_CONFIG."""
    line = on_ranks(1, [])
    for rank, (kind, index) in enumerate(tasks):
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        line += [*([":", "-n", "1"] if rank else []), "env", f"TF_CONFIG={config}", *apart(command)]
    return line


def run(command):
    """How a command ended that runs until its end, and what it said: (rank, text) of each line.

    The lines of a rank are in their order, the ranks one after the other.
    """
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        said = Path(name) / "said"
        said.mkdir()
        os.environ["SAID"] = str(said)
        os.environ.pop("TF_CONFIG", None)
        ending = run_world(command, Path(name), Path(name), LIMIT_SECONDS)
        paths = sorted(said.iterdir(), key=lambda path: int(path.name))
        lines = [(int(path.name), text) for path in paths for text in path.read_text().splitlines()]
    return ending, lines


def lines_of(command):
    """What a command that succeeds says: (rank, text) of each line."""
    ending, lines = run(command)
    assert ending.succeeded, f"{ending.description}\n{ending.tail()}"
    return lines


def known_lines_of(command):
    """As `lines_of`; each command runs once."""
    return _known_lines_of(tuple(command))


@functools.cache
def _known_lines_of(command):
    return lines_of(list(command))
