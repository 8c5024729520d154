"""The comparison of Keras's `fit` with processes that never communicate runs."""

import importlib.util
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_table_has_both_ways(launch, backend):
    for module in ("keras", backend):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} isn't installed: it can't be measured")
    few = ["--batch", "2", "--steps", "2", "--repeats", "1"]
    ended = launch(
        2, [sys.executable, "-m", "bench.keras", "--backend", backend, *few], timeout=300
    )
    rows = [line.split(" | ") for line in ended.stdout.splitlines() if line.startswith("| ")]
    assert ended.returncode == 0, ended.stderr
    assert [row[0].strip("| ") for row in rows[1:]] == ["apart", "fit in the scope"]
    assert all(float(row[2].strip(" |")) > 0 for row in rows[1:])
