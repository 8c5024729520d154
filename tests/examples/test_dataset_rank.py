"""A dataset rank: the training ranks learn, and every batch is delivered once."""

import re
from itertools import chain

import pytest

from tests.examples.support import example, known_lines_of, on_ranks, with_tasks
from tests.slow import slow_but

pytestmark = pytest.mark.slow

EPOCHS, BATCHES = 10, 45
COMMAND = example("dataset_rank", "--numbers")
EPOCH = re.compile(r"epoch +(\d+)  loss (\d\.\d{4})  test accuracy +([\d.]+)%")
RECEIVED = re.compile(r"epoch +(\d+)  replica (\d) received ([\d ]*)")
TOTAL = re.compile(r"replica (\d) received (\d+) batches")
CLUSTER = {"chief": ["a"], "worker": ["b"], "data": ["c"]}
TASKS = [("data", 0), ("worker", 0), ("chief", 0)]

# The command, the number of training ranks, the chief's rank, the dataset ranks.
WAYS = {
    "plainly": (lambda: on_ranks(None, COMMAND), 1, 0, []),
    "1 rank": (lambda: on_ranks(1, COMMAND), 1, 0, []),
    "2 ranks": (lambda: on_ranks(2, COMMAND), 1, 0, [1]),
    "3 ranks": (lambda: on_ranks(3, COMMAND), 2, 0, [2]),
    "independent": (lambda: on_ranks(3, [*COMMAND, "--every", "5"]), 2, 0, [2]),
    "2 deal": (lambda: on_ranks(4, [*COMMAND, "--data-tasks", "2"]), 2, 0, [2, 3]),
    "TF_CONFIG": (lambda: with_tasks(CLUSTER, TASKS, COMMAND), 2, 2, [0]),
}
any_way = pytest.mark.parametrize("way", slow_but(WAYS, "2 deal"))


def said(way):
    """The output of the example with one of the commands."""
    command, *_ = WAYS[way]
    return known_lines_of(command())


def found(pattern, lines):
    """The groups of the lines that match."""
    return [match.groups() for _, text in lines if (match := pattern.fullmatch(text.rstrip()))]


@any_way
def test_the_chief_prints_and_the_data_ranks_serve(way):
    _, training, chief, dealing = WAYS[way]
    lines = said(way)
    dealt = [rank for rank, text in lines if text == f"served {EPOCHS} epochs"]
    assert sorted(dealt) == dealing
    told = [text for rank, text in lines if rank == chief]
    assert len(told) == 1 + EPOCHS * (1 + training) + training == len(lines) - len(dealing)
    assert told[0] == f"{training} replicas train"


@any_way
def test_it_learns(way):
    epochs = found(EPOCH, said(way))
    assert [int(number) for number, *_ in epochs] == list(range(1, EPOCHS + 1))
    assert float(epochs[-1][2]) >= 93
    assert float(epochs[-1][1]) < 0.2 * float(epochs[0][1])


@any_way
def test_every_batch_is_taken_once_in_each_epoch(way):
    taken = {}
    for epoch, _, numbers in found(RECEIVED, said(way)):
        taken.setdefault(int(epoch), []).append([int(number) for number in numbers.split()])
    assert list(taken) == list(range(1, EPOCHS + 1))
    # Two dataset ranks have 23 batches each, of half the digits.
    batches = 46 if way == "2 deal" else BATCHES
    for replicas in taken.values():
        assert len(replicas) == WAYS[way][1]
        assert sorted(chain(*replicas)) == list(range(batches))
        assert all(replicas)
    totals = [sum(map(len, of_replica)) for of_replica in zip(*taken.values(), strict=True)]
    assert found(TOTAL, said(way)) == [(str(k), str(total)) for k, total in enumerate(totals)]
