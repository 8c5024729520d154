"""The comparison of compiled JAX programs with their peers runs."""

import importlib.util
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_tables_have_what_is_installed(launch):
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax isn't installed: it can't be measured")
    few = ["--sizes", "8,64K", "--batch", "2", "--repeats", "1"]
    ended = launch(2, [sys.executable, "-m", "bench.jax", *few], timeout=300)
    assert ended.returncode == 0, ended.stderr
    rows = [line.strip("| ").split(" | ") for line in ended.stdout.splitlines()]
    names = [row[0] for row in rows if len(row) > 2]
    for name in ("mpi4jax", "psum"):
        reason = f"- {name}: not measured: "
        given = any(row[0].startswith(reason) for row in rows)
        assert names.count(name) == (0 if given else 2), ended.stdout
    assert names.count("collectives") == 2
    assert [row[2] for row in rows if row[0] == "apart"] == ["1.00"]
    assert any(row[0] == "strategy.value_and_grad" for row in rows)
