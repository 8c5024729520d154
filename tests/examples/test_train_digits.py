"""The training example, started in every way: it learns, with the same numbers each time."""

import re

import pytest

from tests.examples.support import example, known_lines_of, on_ranks, with_tasks
from tests.slow import slow

EPOCHS = 30

EPOCH = re.compile(
    r"epoch +(?P<epoch>\d+)  loss (?P<loss>\d\.\d{4})  accuracy +(?P<accuracy>[\d.]+)%"
    r"  test loss (?P<test_loss>\d\.\d{4})  test accuracy +(?P<test_accuracy>[\d.]+)%"
    r" +\d+ images/s"
)
CLUSTER = {"chief": ["localhost"], "worker": ["localhost"]}
TASKS = [("worker", 0), ("chief", 0)]
EXAMPLE = example("train_digits")

NAMES = {
    "multi_worker": "MultiWorkerMirroredStrategy",
    "mirrored": "MirroredStrategy",
    "central_storage": "CentralStorageStrategy",
    "local_sgd": "LocalSGDStrategy",
    "one_device": "OneDeviceStrategy",
    "default": "DefaultStrategy",
}


def under(strategy, size=None):
    """The command for a strategy on so many ranks."""
    return on_ranks(size, [*EXAMPLE, "--strategy", strategy])


WAYS = {
    "plainly": lambda: on_ranks(None, EXAMPLE),
    "default": lambda: under("default"),
    "one_device": lambda: under("one_device"),
    "local_sgd": lambda: under("local_sgd"),
    "2 ranks, mirrored": lambda: under("mirrored", 2),
    "3 ranks, mirrored": lambda: under("mirrored", 3),
    "1 ranks, central_storage": lambda: under("central_storage", 1),
    "2 ranks, central_storage": lambda: under("central_storage", 2),
    "3 ranks, central_storage": lambda: under("central_storage", 3),
    "1 rank": lambda: on_ranks(1, EXAMPLE),
    "2 ranks": lambda: on_ranks(2, EXAMPLE),
    "3 ranks": lambda: on_ranks(3, EXAMPLE),
    "TF_CONFIG": lambda: with_tasks(CLUSTER, TASKS, EXAMPLE),
}
any_way = pytest.mark.parametrize("way", slow(*WAYS))


def lines_of(way):
    """The output of the example with one of the commands."""
    return known_lines_of(WAYS[way]())


def epochs_of(lines):
    """The numbers in the lines of the epochs, without the speed."""
    return [EPOCH.fullmatch(text).groupdict() for _, text in lines[1:]]


@any_way
def test_only_the_chief_prints_a_line_for_each_epoch(way):
    lines = lines_of(way)
    assert {rank for rank, _ in lines} == {1 if way == "TF_CONFIG" else 0}
    replicas = int(way[0]) if way[0].isdigit() else 2 if way == "TF_CONFIG" else 1
    name = NAMES.get(way.split(", ")[-1], NAMES["multi_worker"])
    expected = f"<{name} replica 0 of {replicas}>: {replicas} replicas in sync"
    assert lines[0][1] == expected
    numbers = [int(epoch["epoch"]) for epoch in epochs_of(lines)]
    assert numbers == list(range(1, EPOCHS + 1))


@any_way
def test_it_learns_to_read_digits(way):
    first, *_, last = epochs_of(lines_of(way))
    assert float(last["test_accuracy"]) >= 97
    assert float(last["accuracy"]) >= 99
    assert float(last["loss"]) < 0.1 * float(first["loss"])


@any_way
def test_every_way_gives_the_same_numbers(way):
    """To one unit of the last digit: the number of replicas changes the summation order."""
    expected = epochs_of(lines_of("plainly"))
    for epoch, wanted in zip(epochs_of(lines_of(way)), expected, strict=True):
        for name in ("loss", "test_loss"):
            assert float(epoch[name]) == pytest.approx(float(wanted[name]), abs=1.5e-4), epoch
        assert epoch["test_accuracy"] == wanted["test_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, *slow(3)])
def test_one_copy_of_the_variables_gives_the_bits_of_many(size):
    expected = epochs_of(known_lines_of(under("mirrored", size)))
    assert epochs_of(known_lines_of(under("central_storage", size))) == expected


@pytest.mark.slow
def test_local_sgd_learns_as_well():
    lines = known_lines_of(under("local_sgd", 2))
    assert lines[0][1] == "<LocalSGDStrategy replica 0 of 2>: 1 replicas in sync"
    first, *_, last = epochs_of(lines)
    assert float(last["test_accuracy"]) >= 96
    assert float(last["loss"]) < 0.2 * float(first["loss"])
    assert last != epochs_of(lines_of("plainly"))[-1]
