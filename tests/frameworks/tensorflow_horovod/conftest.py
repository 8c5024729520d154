"""Horovod's interface for TensorFlow, initialized, in the worlds of the tests."""

import pytest


@pytest.fixture(scope="session")
def hvd(tf, comm):
    import strategies.tensorflow.horovod as hvd

    hvd.init()
    return hvd


@pytest.fixture
def keras(tf):
    keras = pytest.importorskip("keras", reason="keras isn't installed")
    keras.utils.set_random_seed(0)
    return keras
