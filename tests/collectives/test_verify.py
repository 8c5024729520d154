"""Every registered algorithm satisfies its collective's condition, at every size."""

import numpy as np
import pytest

import collectives
from collectives import algorithms
from collectives.schedules.schedule import for_rank
from tests.slow import slow

PAIRS = algorithms.pairs()


SIZES = [*range(1, 20), 31, 32, 33, 64]
OTHERS = [size for size in range(20, 64) if size not in SIZES]


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
@pytest.mark.parametrize("sizes", [SIZES, *slow(OTHERS)], ids=["some", "others"])
def test_exact_up_to_64_ranks(collective, algorithm, sizes):
    for size in sizes:
        collectives.verify(collective, algorithm, size)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
@pytest.mark.parametrize("size", [300, *slow(1024, 4096)])
def test_by_fingerprint_on_many_ranks(collective, algorithm, size):
    collectives.verify(collective, algorithm, size)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_one_rank_and_all_ranks_at_once_give_the_same_steps(collective, algorithm, size):
    schedule = algorithms.find(collective, algorithm).schedule
    rounds = list(schedule(np.arange(size), size))
    for rank in range(size):
        alone = for_rank(schedule, rank, size)
        assert alone == [_steps_of(steps, rank, size) for steps in rounds]


def _steps_of(steps, rank, size):
    chosen = []
    for step in steps:
        chunk, peer, count, when = (
            np.broadcast_to(value, size)[rank]
            for value in (step.chunk, step.peer, step.count, step.when)
        )
        if when and count > 0:
            chosen.append(type(step)(int(chunk), int(peer), int(count)))
    return chosen


def test_every_collective_has_an_algorithm():
    from collectives.schedules.spec import SPECS

    assert {collective for collective, _ in PAIRS} == set(SPECS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("all_reduce", "rign", 4), "'ring'"),
        (("all_redcue", "ring", 4), "all_reduce"),
        (("all_reduce", "ring", 0), "size=0"),
    ],
)
def test_unknown_names_and_sizes_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        collectives.verify(*arguments)
