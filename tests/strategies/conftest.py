"""Fixtures for strategies."""

import pytest

import strategies


@pytest.fixture(autouse=True)
def no_tf_config(monkeypatch):
    """A TF_CONFIG of the surroundings is none of the tests' business."""
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.fixture
def strategy(comm):
    """A strategy of the world's ranks, none of whose scopes stays entered."""
    made = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    yield made
    assert not strategies.has_strategy()
    made.communicator.close()
