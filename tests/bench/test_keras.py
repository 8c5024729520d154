"""The comparison of Keras's `fit` with processes that never communicate runs."""

import importlib.util
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_the_tables_have_all_ways(launch, backend):
    for module in ("keras", backend):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} isn't installed: it can't be measured")
    few = ["--batch", "2", "--steps", "2", "--repeats", "1"]
    ended = launch(
        2, [sys.executable, "-m", "bench.keras", "--backend", backend, *few], timeout=300
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("| ")]
    rows = [line.split(" | ") for line in lines if not line.startswith("| training")]
    assert ended.returncode == 0, ended.stderr
    apart = ["apart", "apart, with a barrier after each step"]
    loops = [*apart, "strategies.tensorflow", "TensorFlow's own"]
    fits = [*apart, "compile in the scope"]
    due = [*loops, *fits] if backend == "tensorflow" else fits
    assert [row[0].strip("| ") for row in rows] == due
    assert all(float(row[2].strip(" |")) > 0 for row in rows)
