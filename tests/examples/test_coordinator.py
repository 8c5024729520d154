"""The coordinator's example: a chief, two workers and a ps, each with a TF_CONFIG."""

import re

import pytest

from tests.examples.support import example, lines_of, on_ranks, run, with_tasks

pytestmark = pytest.mark.slow

EXAMPLE = example("coordinator")
EPOCHS = 12
EPOCH = re.compile(
    r"epoch +(?P<epoch>\d+)  loss (?P<loss>\d\.\d{4})  test accuracy +(?P<accuracy>[\d.]+)%"
    r" +\d+ steps/s"
)
CLUSTER = {"chief": ["h"], "worker": ["h", "h"], "ps": ["h"]}
# Not in the order of the tasks.
TASKS = [("worker", 1), ("ps", 0), ("chief", 0), ("worker", 0)]


def test_the_chief_trains_with_its_workers():
    lines = lines_of(with_tasks(CLUSTER, TASKS, EXAMPLE))
    served = {rank: text.split(":")[0] for rank, text in lines if "has finished" in text}
    assert served == {0: "worker 1", 1: "ps 0", 3: "worker 0"}
    told = [text for rank, text in lines if rank == 2]
    epochs = [EPOCH.fullmatch(text).groupdict() for text in told]
    assert [int(epoch["epoch"]) for epoch in epochs] == list(range(1, EPOCHS + 1))
    assert float(epochs[-1]["loss"]) < 0.1 * float(epochs[0]["loss"])
    assert float(epochs[-1]["accuracy"]) >= 95
    assert len(lines) == EPOCHS + 3


def test_without_a_cluster_it_says_what_it_needs():
    ending, _ = run(on_ranks(None, EXAMPLE))
    assert not ending.succeeded
    assert "each with a TF_CONFIG" in ending.output
