"""Fixtures for tests with real frameworks, each skipped where the framework isn't installed."""

import os

import pytest

import strategies
from tests.strategies.support import lone_strategy


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    yield
    assert not strategies.has_strategy()


def imported(name):
    return pytest.importorskip(name, reason=f"{name} isn't installed: it can't be tested with")


@pytest.fixture(scope="session")
def torch():
    return imported("torch")


@pytest.fixture(scope="session")
def tf():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        # Its fused convolution gives an empty batch a wrong shape (TensorFlow 2.21).
        patch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
        return imported("tensorflow")


@pytest.fixture(scope="session")
def keras(request):
    """Keras on the backend that KERAS_BACKEND names, else on TensorFlow."""
    if os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow":
        request.getfixturevalue("tf")
    return imported("keras")


@pytest.fixture
def strategy():
    """A strategy that behaves as one of several ranks, though it is alone: refusals are local."""
    strategy = lone_strategy()
    strategy.trains_alone = False
    return strategy
