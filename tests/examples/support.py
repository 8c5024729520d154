"""Start examples as users do, and assign output lines to ranks."""

import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from tests.worlds.launcher import NO_MPIRUN, find_mpirun, mpirun_command, run_world

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 120

# The mark of a line's rank, as MPICH and as Open MPI write it.
RANK = re.compile(r"\[(?:[^\]]*,)?(\d+)\](?:<stdout>:)? ?")


def example(name, *options):
    """The command of an example."""
    return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]


def on_ranks(size, command):
    """The command under mpirun; None: without it."""
    if size is None:
        return command
    if not (mpirun := find_mpirun()):
        pytest.fail(NO_MPIRUN, pytrace=False)
    return [*mpirun_command(mpirun, size), *command]


def with_tasks(cluster, tasks, command):
    """The command under mpirun, once for each task, in order, with its TF_CONFIG."""
    line = on_ranks(1, [])
    for rank, (kind, index) in enumerate(tasks):
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        line += [*([":", "-n", "1"] if rank else []), "env", f"TF_CONFIG={config}", *command]
    return line


def run(command):
    """How a command ended that runs until its end."""
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        os.environ.pop("TF_CONFIG", None)
        return run_world(command, Path(name), Path(name), LIMIT_SECONDS)


def lines_of(command):
    """What a command that succeeds says: (rank, text) of each line."""
    ending = run(command)
    assert ending.succeeded, f"{ending.description}\n{ending.tail()}"
    return [read_line(line) for line in ending.output.splitlines()]


def known_lines_of(command):
    """As `lines_of`; each command runs once."""
    return _known_lines_of(tuple(command))


@functools.cache
def _known_lines_of(command):
    return lines_of(list(command))


def read_line(line):
    """The rank and the text; MPICH marks every write, and so possibly the end of a line too."""
    ranks = {int(rank) for rank in RANK.findall(line)} or {0}
    assert len(ranks) == 1
    return ranks.pop(), RANK.sub("", line)
