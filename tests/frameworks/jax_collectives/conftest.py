"""JAX, where it is installed."""

import pytest


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.fixture(scope="session")
def jax():
    return pytest.importorskip("jax", reason="jax isn't installed: it can't be tested with")


@pytest.fixture(scope="session")
def calls(jax):
    import collectives.jax

    return collectives.jax
