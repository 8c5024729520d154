from dataclasses import replace

import numpy as np
import pytest

from bench.problem import Problem
from bench.stream import Stream, measure_stream
from bench.yardstick import Yardstick

LARGE = Problem(ranks=2, count=16 << 20, dtype=np.dtype(np.float32))
MEDIUM, SMALL = replace(LARGE, count=16 << 10), replace(LARGE, count=(16 << 10) - 1)
YARDSTICK = Yardstick("all_reduce", nodes=1, registered=True, stream=Stream(copy=1e9, add=8e9))


def ratio(yardstick, problem, algorithm="auto", theirs=None, in_place=True):
    return yardstick.ratio(problem, algorithm, theirs or problem, in_place=in_place)


def test_the_model_applies_from_64_kib_on():
    assert ratio(YARDSTICK, MEDIUM) == (1.75, 2.75)
    assert ratio(YARDSTICK, MEDIUM, in_place=False) == (2.75, 3.75)
    assert ratio(YARDSTICK, SMALL) is None


def test_a_peer_of_twice_the_bytes_takes_twice_as_long():
    short = replace(MEDIUM, count=32 << 10, dtype=np.dtype(np.float16))
    assert ratio(YARDSTICK, short, theirs=replace(short, dtype=LARGE.dtype)) == (3.5, 5.5)


@pytest.mark.parametrize(
    "changed", [{"collective": "broadcast"}, {"nodes": 2}], ids=["broadcast", "two nodes"]
)
def test_nothing_is_predicted_of_what_the_model_does_not_cover(changed):
    yardstick = replace(YARDSTICK, **changed)
    assert ratio(yardstick, LARGE) is None
    assert yardstick.of_stream(LARGE, "auto", 1.0) is None


def test_nothing_is_predicted_of_forced_algorithms_or_of_one_rank():
    assert ratio(YARDSTICK, LARGE, "ring") is None
    assert YARDSTICK.of_stream(LARGE, "ring", 1.0) is None
    assert ratio(YARDSTICK, replace(LARGE, ranks=1)) is None


def test_the_part_of_the_bandwidth():
    seconds = 2 * 2 * LARGE.nbytes / 8e9
    assert YARDSTICK.of_stream(LARGE, "auto", seconds) == pytest.approx(1)
    ordinary = replace(YARDSTICK, registered=False)
    assert ordinary.of_stream(LARGE, "auto", seconds) == pytest.approx(2.5)
    assert YARDSTICK.of_stream(MEDIUM, "auto", seconds) is None
    assert replace(YARDSTICK, stream=None).of_stream(LARGE, "auto", seconds) is None


class Clock:
    """Two ranks, of which the slower takes 500 s for a copy and 1000 s for an addition."""

    size = 2

    def Barrier(self):  # noqa: N802
        pass

    def allgather(self, seconds):
        slower = np.zeros_like(seconds)
        slower[0], slower[1] = 500, 1000
        return [seconds, slower]


def test_the_stream_counts_loads_and_stores_of_all_ranks():
    stream = measure_stream(Clock(), nbytes=4000, repeats=3)
    assert stream == Stream(copy=2 * 4000 * 2 / 500, add=3 * 4000 * 2 / 1000)
    assert str(Stream(copy=12.34e9, add=5e9)) == "12.3 / 5.0"
