"""TPUStrategy and logical devices, on devices of the CPU: no TPU was at hand."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.slow import slow

PROGRAM = str(Path(__file__).with_name("tpu_program.py"))
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "jax.md"


@pytest.fixture
def run(jax, launch, monkeypatch):
    """Run a program of Python on so many ranks, 4 devices in all; its output."""
    pytest.importorskip("jax", "0.10", reason="TPUStrategy needs JAX 0.10")

    def on_ranks(ranks, *program):
        count = f"--xla_force_host_platform_device_count={4 // ranks}"
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {count}".strip())
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        monkeypatch.delenv("TF_CONFIG", raising=False)
        ended = launch(ranks, [sys.executable, "-W", "error", *program], timeout=200)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return on_ranks


@pytest.mark.parametrize("ranks", [2, *slow(1)])
def test_replicas_on_all_devices(run, ranks):
    said = run(ranks, PROGRAM)
    for rank in range(ranks):
        assert f"rank {rank} has ended" in said


def test_the_program_of_the_page(run):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (program,) = (each for each in blocks if "TPUStrategy" in each)
    check = "assert float(loss) < 1e-3 and np.allclose(final, 1, atol=0.05); print('learned')"
    assert run(2, "-c", f"{program}\n{check}").count("learned") == 2


def test_a_program_that_makes_calls_runs_at_the_exit(run):
    program = """
import jax, jax.numpy as jnp, collectives, collectives.jax
comm = collectives.world(deadline=30)

@jax.jit
def slow(steps):
    matrix = jnp.ones((100, 100))
    return collectives.jax.all_reduce(jax.lax.fori_loop(0, steps, lambda _, m: m @ m, matrix))

slow(1).block_until_ready()
slow(3000 * (1 + comm.rank))
print("leaves")
"""
    assert run(2, "-c", program).count("leaves") == 2
