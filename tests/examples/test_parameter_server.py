"""The parameter server example: both workers learn, and the server ends after them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.launcher import NO_MPIRUN, find_mpirun, mpirun_command, run_world

ROOT = Path(__file__).parents[2]
EXAMPLE = [sys.executable, str(ROOT / "examples" / "parameter_server.py")]
EPOCHS = 8
CLUSTER = {"worker": ["localhost"] * 2, "ps": ["localhost"]}
TASKS = [("worker", 0), ("ps", 0), ("worker", 1)]
# MPICH marks every write with its rank, and so possibly the middle of a line.
RANK = re.compile(r"\[(?:[^\]]*,)?\d+\](?:<stdout>:)? ?")
EPOCH = re.compile(
    r"worker (\d): epoch +(\d+)  loss (\d+\.\d{4})  test accuracy +([\d.]+)% +\d+ steps/s"
)


def config(task_type, index):
    return json.dumps({"cluster": CLUSTER, "task": {"type": task_type, "index": index}})


def run(directory, *options):
    """The output of two workers and a server."""
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.fail(NO_MPIRUN, pytrace=False)
    command = mpirun_command(mpirun, 1)
    for number, task in enumerate(TASKS):
        command += [":", "-n", "1"] if number else []
        command += ["env", f"TF_CONFIG={config(*task)}", *EXAMPLE, *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("TF_CONFIG", raising=False)
        ending = run_world(command, directory, directory, 120)
    assert ending.succeeded, f"{ending.description}\n{ending.tail()}"
    return RANK.sub("", ending.output)


@pytest.mark.parametrize("options", [(), ("--staleness", "0")])
def test_both_workers_learn_to_read_digits(tmp_path, options):
    text = run(tmp_path, *options)
    # Lines that two ranks write at once may be joined.
    found = list(EPOCH.finditer(text))
    for worker in "01":
        epochs = [match for match in found if match[1] == worker]
        assert [int(match[2]) for match in epochs] == list(range(1, EPOCHS + 1)), text
        assert float(epochs[-1][4]) >= 95, text
        assert float(epochs[-1][3]) < 0.2 * float(epochs[0][3]), text
    assert text.count("ps 0: all workers have finished") == 1
    assert EPOCH.sub("", text).replace("ps 0: all workers have finished", "").split() == []


@pytest.mark.parametrize(
    ("text", "said"), [(None, ""), (config("ps", 0), "start all tasks with one mpirun")]
)
def test_without_mpirun_it_prints_its_requirements(text, said):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if text is None else {"TF_CONFIG": text})
    ended = subprocess.run(
        EXAMPLE, capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert ended.returncode == 1
    assert "The first lines of this file show the command." in ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
