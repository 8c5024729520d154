"""The example with a parameter server: both workers learn, and the server ends after them."""

import json
import os
import re
import subprocess

import pytest

from tests.examples.support import ROOT, example, lines_of, with_tasks
from tests.slow import slow

pytestmark = pytest.mark.slow

EXAMPLE = example("parameter_server")
EPOCHS = 8
CLUSTER = {"worker": ["localhost"] * 2, "ps": ["localhost"]}
TASKS = [("worker", 0), ("ps", 0), ("worker", 1)]
EPOCH = re.compile(
    r"worker (\d): epoch +(\d+)  loss (\d+\.\d{4})  test accuracy +([\d.]+)% +\d+ steps/s"
)


def config(task_type, index):
    return json.dumps({"cluster": CLUSTER, "task": {"type": task_type, "index": index}})


@pytest.mark.parametrize("options", [(), *slow(("--staleness", "0"))])
def test_both_workers_learn_to_read_digits(options):
    lines = lines_of(with_tasks(CLUSTER, TASKS, [*EXAMPLE, *options]))
    for rank, worker in ((0, "0"), (2, "1")):
        epochs = [EPOCH.fullmatch(text) for each, text in lines if each == rank]
        assert all(match[1] == worker for match in epochs), lines
        assert [int(match[2]) for match in epochs] == list(range(1, EPOCHS + 1)), lines
        assert float(epochs[-1][4]) >= 95, lines
        assert float(epochs[-1][3]) < 0.2 * float(epochs[0][3]), lines
    assert [text for rank, text in lines if rank == 1] == ["ps 0: all workers have finished"]


@pytest.mark.parametrize(
    ("text", "said"), [(None, ""), (config("ps", 0), "start all tasks with one mpirun")]
)
def test_without_mpirun_it_says_what_it_needs(text, said):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if text is None else {"TF_CONFIG": text})
    ended = subprocess.run(
        EXAMPLE, capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert ended.returncode == 1
    assert "The first lines of this file show the command." in ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
