"""The training example, started in every way: it learns, and says the same each time."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.worlds.launcher import NO_MPIRUN, find_mpirun, mpirun_command, run_world

ROOT = Path(__file__).parents[2]
EXAMPLE = [sys.executable, str(ROOT / "examples" / "train_digits.py")]
LIMIT_SECONDS = 120
EPOCHS = 30

# The mark of a line's rank, as MPICH and as Open MPI write it.
RANK = re.compile(r"\[(?:[^\]]*,)?(\d+)\](?:<stdout>:)? ?")
EPOCH = re.compile(
    r"epoch +(?P<epoch>\d+)  loss (?P<loss>\d\.\d{4})  accuracy +(?P<accuracy>[\d.]+)%"
    r"  test loss (?P<test_loss>\d\.\d{4})  test accuracy +(?P<test_accuracy>[\d.]+)%"
    r" +\d+ images/s"
)
CLUSTER = {"chief": ["localhost"], "worker": ["localhost"]}


def mpirun(size):
    found = find_mpirun()
    if found is None:
        pytest.fail(NO_MPIRUN, pytrace=False)
    return mpirun_command(found, size)


def plainly():
    return EXAMPLE


def without_a_strategy():
    return [*EXAMPLE, "--strategy", "default"]


def under_mpirun(size):
    return lambda: [*mpirun(size), *EXAMPLE]


def with_tf_config():
    """Two processes with a TF_CONFIG each; the chief is the last one."""
    command = mpirun(1)
    for task_type in ("worker", "chief"):
        config = json.dumps({"cluster": CLUSTER, "task": {"type": task_type, "index": 0}})
        command += ["env", f"TF_CONFIG={config}", *EXAMPLE]
        command += [":", "-n", "1"] if task_type == "worker" else []
    return command


WAYS = {
    "plainly": plainly,
    "without a strategy": without_a_strategy,
    "1 rank": under_mpirun(1),
    "2 ranks": under_mpirun(2),
    "3 ranks": under_mpirun(3),
    "TF_CONFIG": with_tf_config,
}
any_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def lines_of(tmp_path_factory):
    """A function that runs the example in one of the ways, once: (rank, text) of each line."""
    known = {}

    def run(way):
        directory = tmp_path_factory.mktemp("example")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(ROOT))
            patch.delenv("TF_CONFIG", raising=False)
            ending = run_world(WAYS[way](), directory, directory, LIMIT_SECONDS)
        assert ending.succeeded, f"{ending.description}\n{ending.tail()}"
        return [read_line(line) for line in ending.output.splitlines()]

    def run_once(way):
        if way not in known:
            known[way] = run(way)
        return known[way]

    return run_once


def read_line(line):
    """The rank and the text; MPICH marks every write, and so possibly the end of a line too."""
    ranks = {int(rank) for rank in RANK.findall(line)} or {0}
    assert len(ranks) == 1
    return ranks.pop(), RANK.sub("", line)


def epochs_of(lines):
    """What the lines of the epochs say, without the speed."""
    return [EPOCH.fullmatch(text).groupdict() for _, text in lines[1:]]


@any_way
def test_only_the_chief_prints_a_line_for_each_epoch(lines_of, way):
    lines = lines_of(way)
    assert {rank for rank, _ in lines} == {1 if way == "TF_CONFIG" else 0}
    replicas = int(way[0]) if way[0].isdigit() else 2 if way == "TF_CONFIG" else 1
    name = "DefaultStrategy" if way == "without a strategy" else "MultiWorkerMirroredStrategy"
    expected = f"<{name} replica 0 of {replicas}>: {replicas} replicas in sync"
    assert lines[0][1] == expected
    numbers = [int(epoch["epoch"]) for epoch in epochs_of(lines)]
    assert numbers == list(range(1, EPOCHS + 1))


@any_way
def test_it_learns_to_read_digits(lines_of, way):
    first, *_, last = epochs_of(lines_of(way))
    assert float(last["test_accuracy"]) >= 97
    assert float(last["accuracy"]) >= 99
    assert float(last["loss"]) < 0.1 * float(first["loss"])


@any_way
def test_every_way_gives_the_same_numbers(lines_of, way):
    """To one unit of the last digit: other numbers of replicas only add up in another order."""
    expected = epochs_of(lines_of("plainly"))
    for epoch, wanted in zip(epochs_of(lines_of(way)), expected, strict=True):
        for name in ("loss", "test_loss"):
            assert float(epoch[name]) == pytest.approx(float(wanted[name]), abs=1.5e-4), epoch
        assert epoch["test_accuracy"] == wanted["test_accuracy"]
