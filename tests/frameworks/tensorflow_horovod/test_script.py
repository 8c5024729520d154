"""A Horovod user's script, changed in its import alone, trains on two ranks."""

import re
import sys
from pathlib import Path

import pytest

from tests.slow import slow

SCRIPT = Path(__file__).with_name("digits.py")


@pytest.mark.parametrize("loop", slow("fit", "own"))
def test_the_script_trains(launch, tmp_path, loop):
    for package in ("tensorflow", "sklearn"):
        pytest.importorskip(package, reason=f"{package} isn't installed")
    path = tmp_path / "digits.keras"
    command = [sys.executable, str(SCRIPT), "--loop", loop, "--checkpoint", str(path)]
    ended = launch(2, command, timeout=150)
    assert ended.returncode == 0, ended.stderr
    (accuracy,) = re.findall(r"Accuracy: ([\d.]+)%", ended.stdout)
    assert float(accuracy) > 75
    assert list(tmp_path.glob("digits.keras*"))
