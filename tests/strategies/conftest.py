"""Fixtures for strategies."""

import pytest

import strategies


@pytest.fixture(autouse=True)
def no_tf_config(monkeypatch):
    """Remove a TF_CONFIG of the environment."""
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.fixture
def strategy(comm):
    """A strategy of the world's ranks; the test must exit each of its scopes."""
    made = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    yield made
    assert not strategies.has_strategy()
    made.communicator.close()
