"""The coordinator's example: a chief, two workers and a ps, each with a TF_CONFIG."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.worlds.launcher import NO_MPIRUN, find_mpirun, mpirun_command, run_world

ROOT = Path(__file__).parents[2]
EXAMPLE = [sys.executable, str(ROOT / "examples" / "coordinator.py")]
LIMIT_SECONDS = 120
EPOCHS = 12

# The mark of a line's rank, as MPICH and as Open MPI write it.
RANK = re.compile(r"\[(?:[^\]]*,)?(\d+)\](?:<stdout>:)? ?")
EPOCH = re.compile(
    r"epoch +(?P<epoch>\d+)  loss (?P<loss>\d\.\d{4})  test accuracy +(?P<accuracy>[\d.]+)%"
    r" +\d+ steps/s"
)
CLUSTER = {"chief": ["h"], "worker": ["h", "h"], "ps": ["h"]}
# Not in the order of the tasks.
TASKS = [("worker", 1), ("ps", 0), ("chief", 0), ("worker", 0)]


def command():
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.fail(NO_MPIRUN, pytrace=False)
    line = mpirun_command(mpirun, 1)
    for number, (task_type, index) in enumerate(TASKS):
        config = json.dumps({"cluster": CLUSTER, "task": {"type": task_type, "index": index}})
        line += [":", "-n", "1"] if number else []
        line += ["env", f"TF_CONFIG={config}", *EXAMPLE]
    return line


def test_the_chief_trains_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ending = run_world(command(), tmp_path, tmp_path, LIMIT_SECONDS)
    assert ending.succeeded, f"{ending.description}\n{ending.tail()}"
    lines = [RANK.sub("", line) for line in ending.output.splitlines()]
    served = sorted(line.split(":")[0] for line in lines if "has finished" in line)
    assert served == ["ps 0", "worker 0", "worker 1"]
    epochs = [found.groupdict() for line in lines if (found := EPOCH.fullmatch(line))]
    assert [int(epoch["epoch"]) for epoch in epochs] == list(range(1, EPOCHS + 1))
    assert float(epochs[-1]["loss"]) < 0.1 * float(epochs[0]["loss"])
    assert float(epochs[-1]["accuracy"]) >= 95
    assert len(lines) == EPOCHS + 3


def test_without_a_cluster_it_prints_its_requirements(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    ending = run_world(EXAMPLE, tmp_path, tmp_path, LIMIT_SECONDS)
    assert not ending.succeeded
    assert "each with a TF_CONFIG" in ending.output
