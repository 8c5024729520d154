"""The local SGD example: it learns, with averages and with an outer optimizer."""

import re
import sys
from pathlib import Path

import pytest

from tests.slow import slow_but

pytestmark = pytest.mark.slow

EXAMPLE = [sys.executable, str(Path(__file__).parents[2] / "examples" / "local_sgd.py")]
EPOCH = re.compile(
    r"epoch +(?P<epoch>\d+) +(?P<steps>\d+) steps  loss (?P<loss>\d\.\d{4})"
    r"  test accuracy +(?P<accuracy>[\d.]+)%"
)
WAYS = {
    "one rank": (1, []),
    "every step": (2, ["--every", "1"]),
    "every 10 steps": (2, []),
    "three ranks": (3, ["--every", "5"]),
    "seconds": (2, ["--seconds", "0.02"]),
    "DiLoCo": (2, ["--outer"]),
}


@pytest.mark.parametrize("way", slow_but(WAYS, "DiLoCo"))
def test_it_learns_to_read_digits(launch, way):
    ranks, options = WAYS[way]
    ended = launch(ranks, [*EXAMPLE, *options], timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, *lines = ended.stdout.splitlines()
    assert first == f"<LocalSGDStrategy replica 0 of {ranks}>"
    epochs = [EPOCH.fullmatch(line).groupdict() for line in lines]
    assert [int(each["epoch"]) for each in epochs] == list(range(1, 11))
    # 44 whole batches, shared between the ranks.
    assert {int(each["steps"]) for each in epochs} == {-(-44 // ranks)}
    assert float(epochs[-1]["loss"]) < 0.5 * float(epochs[0]["loss"])
    assert float(epochs[-1]["accuracy"]) >= 94
