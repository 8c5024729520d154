"""The example with TensorFlow learns to read digits, and continues from its checkpoint."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).parents[2] / "examples" / "tensorflow_custom_loop.py"


def test_it_learns_to_read_digits(launch, tmp_path):
    for module in ("tensorflow", "sklearn", "matplotlib", "rich"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} isn't installed: the example with TensorFlow can't be tested")
    plot = tmp_path / "plot.png"
    command = [sys.executable, str(PROGRAM), "--checkpoints", str(tmp_path / "state")]
    first = launch(2, [*command, "--epochs", "5"], timeout=180)
    assert first.returncode == 0, first.stdout + first.stderr
    second = launch(1, [*command, "--epochs", "8", "--plot", str(plot)], timeout=180)
    assert second.returncode == 0, second.stdout + second.stderr
    found = re.findall(
        r"^epoch +(\d+)  loss ([\d.]+)  test accuracy +([\d.]+)%",
        first.stdout + second.stdout,
        re.MULTILINE,
    )
    assert [int(each[0]) for each in found] == [*range(1, 9)]
    assert float(found[-1][1]) < 0.3 * float(found[0][1])
    assert float(found[-1][2]) > 90
    assert plot.read_bytes().startswith(b"\x89PNG")
