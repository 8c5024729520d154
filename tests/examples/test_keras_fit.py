"""The example with Keras learns to read digits, on several ranks."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).parents[2] / "examples" / "keras_fit.py"


@pytest.mark.parametrize(("backend", "ranks"), [("torch", 2), ("torch", 1), ("jax", 2)])
def test_it_learns_to_read_digits(launch, tmp_path, backend, ranks):
    for module in ("keras", backend, "sklearn", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} isn't installed: the example with Keras can't be tested")
    plot = tmp_path / "plot.png"
    command = ["env", f"KERAS_BACKEND={backend}", sys.executable, str(PROGRAM)]
    ended = launch(ranks, [*command, "--epochs", "10", "--plot", str(plot)], timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = [float(each) for each in re.findall(r" loss: ([\d.]+)", ended.stdout)]
    assert len(losses) == 10
    assert losses[-1] < 0.3 * losses[0]
    accuracy = re.search(r"^test accuracy ([\d.]+)%", ended.stdout, re.MULTILINE)
    assert float(accuracy[1]) > 90
    assert plot.read_bytes().startswith(b"\x89PNG")
