"""accelerate, Hugging Face's Trainer and Lightning train over "collectives" under torchrun."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch isn't installed: it can't be tested with")

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("program.py")


def trained(library, ranks):
    """The weights that the program prints at the end, after the name of the backend."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    # A port of the system's choice.
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [*command, str(PROGRAM), library],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("REPORT")]
    _, backend, size, *weights = line.split()
    assert (backend, size) == ("collectives", str(ranks))
    return [float(weight) for weight in weights]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["accelerate", "transformers", "lightning"])
def test_two_ranks_train_as_one_does(library):
    if find_spec(library) is None:
        pytest.skip(f"{library} isn't installed")
    assert trained(library, 2) == pytest.approx(trained(library, 1), abs=2e-4)
