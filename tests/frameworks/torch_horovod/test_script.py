"""A Horovod user's script, changed in its import alone, trains on two ranks."""

import re
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("digits.py")


def test_the_script_trains(torch, launch):
    pytest.importorskip("sklearn", reason="scikit-learn isn't installed: it has the digits")
    ended = launch(2, [sys.executable, str(SCRIPT), "--epochs", "8"], timeout=150)
    assert ended.returncode == 0, ended.stderr
    (accuracy,) = re.findall(r"Accuracy: ([\d.]+)%", ended.stdout)
    assert float(accuracy) > 85
    assert ended.stdout.count("Train Epoch: 8 [0/720]") == 1
