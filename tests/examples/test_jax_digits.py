"""The example with JAX learns to read digits, and goes on from its checkpoint."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PROGRAM = str(Path(__file__).parents[2] / "examples" / "jax_digits.py")
EPOCH = re.compile(
    r"epoch +(\d+)  loss (\d\.\d{4})  test accuracy +([\d.]+)% +\d+ images/s", re.MULTILINE
)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, ()), (2, ()), (2, ("--sync-every", "8")), (2, ("--sync-every", "8", "--outer"))],
    ids=["alone", "in step", "local SGD", "DiLoCo"],
)
def test_it_learns_to_read_digits(launch, tmp_path, ranks, options):
    for module in ("jax", "optax", "sklearn", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} isn't installed: the example with JAX can't be tested")
    plot = tmp_path / "plot.png"
    command = [sys.executable, PROGRAM, "--checkpoint", str(tmp_path / "state")]
    command += options
    ended = launch(ranks, [*command, "--epochs", "5", "--plot", str(plot)], timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    epochs = EPOCH.findall(ended.stdout)
    assert [int(epoch) for epoch, *_ in epochs] == list(range(1, 6))
    first, last = (float(each[1]) for each in (epochs[0], epochs[-1]))
    assert last < 0.2 * first
    assert float(epochs[-1][2]) >= 92
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = launch(ranks, [*command, "--epochs", "1"], timeout=150)
    assert again.returncode == 0, again.stdout + again.stderr
    assert float(EPOCH.findall(again.stdout)[0][1]) < 2 * last
