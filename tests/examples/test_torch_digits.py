"""The examples with torch: each learns to read digits, alone and on several ranks."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.slow import slow_but

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCH = re.compile(
    r"epoch +(?P<epoch>\d+)  loss (?P<loss>\d\.\d{4})  test accuracy +(?P<accuracy>[\d.]+)%"
    r" +\d+ images/s"
)
WAYS = {
    "wrapper": (2, []),
    "wrapper, alone": (1, []),
    "wrapper, three ranks": (3, []),
    "local_sgd": (2, []),
    "local_sgd, DiLoCo": (2, ["--outer"]),
    "ddp": (2, []),
    "fsdp": (2, []),
}


@pytest.mark.parametrize("way", slow_but(WAYS, "wrapper"))
def test_it_learns_to_read_digits(launch, tmp_path, way):
    for module in ("torch", "sklearn", "rich", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} isn't installed: the examples with torch can't be tested")
    ranks, options = WAYS[way]
    program = str(EXAMPLES / f"torch_{way.partition(',')[0]}.py")
    plot = tmp_path / "plot.png"
    ended = launch(ranks, [sys.executable, program, *options, "--plot", str(plot)], timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    epochs = [EPOCH.fullmatch(line).groupdict() for line in ended.stdout.splitlines()]
    assert [int(each["epoch"]) for each in epochs] == list(range(1, 9))
    assert float(epochs[-1]["loss"]) < 0.1 * float(epochs[0]["loss"])
    assert float(epochs[-1]["accuracy"]) >= 95
    assert plot.read_bytes().startswith(b"\x89PNG")
