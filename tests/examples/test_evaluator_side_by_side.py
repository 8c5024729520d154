"""Chief and worker train, the evaluator evaluates each of their checkpoints, once and in order."""

import re

import pytest

from tests.examples.support import example, lines_of, on_ranks, with_tasks
from tests.slow import slow

pytestmark = pytest.mark.slow

LINE = re.compile(r"checkpoint of epoch (\d): test accuracy +([\d.]+)%")
CLUSTER = {"chief": ["a"], "worker": ["b"]}
EVALUATOR, CHIEF = 0, 2
TASKS = [("evaluator", 0), ("worker", 0), ("chief", 0)]


@pytest.fixture(scope="module")
def alone():
    return read(lines_of(on_ranks(None, example("evaluator_side_by_side"))))


def read(lines):
    """The epochs and accuracies of evaluations with the rank that told them, and who trained."""
    evaluations = [
        (rank, int(found[1]), float(found[2]))
        for rank, text in lines
        if (found := LINE.fullmatch(text))
    ]
    others = [(rank, text) for rank, text in lines if not LINE.fullmatch(text)]
    return evaluations, others


@pytest.mark.parametrize("inside", [True, *slow(False)], ids=["in the cluster", "outside of it"])
def test_the_evaluator_evaluates_what_the_others_train(inside, alone):
    cluster = CLUSTER | ({"evaluator": ["c"]} if inside else {})
    lines = lines_of(with_tasks(cluster, TASKS, example("evaluator_side_by_side")))
    evaluations, others = read(lines)
    assert others == [(CHIEF, "2 replicas have trained")]
    assert [(rank, epoch) for rank, epoch, _ in evaluations] == [
        (EVALUATOR, epoch) for epoch in range(1, 6)
    ]
    assert [accuracy for *_, accuracy in evaluations] == [accuracy for *_, accuracy in alone[0]]


@pytest.mark.parametrize("size", slow(1, 2))
def test_without_an_evaluator_the_chief_tells_after_training(size, alone):
    evaluations, others = read(lines_of(on_ranks(size, example("evaluator_side_by_side"))))
    assert others == [(0, f"{size} replicas have trained")]
    assert evaluations == alone[0]


def test_it_learns(alone):
    accuracies = [accuracy for *_, accuracy in alone[0]]
    assert len(accuracies) == 5
    assert accuracies[-1] >= 93
    assert accuracies[-1] > accuracies[0]
