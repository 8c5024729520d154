"""What the tests of `strategies.tensorflow` in worlds share."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def ds(tf):
    import strategies.tensorflow

    return strategies.tensorflow


@pytest.fixture
def strategy(ds, comm):
    return ds.MultiWorkerMirroredStrategy(communicator=comm)


@pytest.fixture
def folder(comm, tmp_path):
    return Path(comm.broadcast_object(str(tmp_path)))


@pytest.fixture
def equal_on_all(comm):
    """Assert that arrays have the same bits on every rank."""

    def check(arrays):
        contents = comm.all_gather_object([np.asarray(each).tobytes() for each in arrays])
        assert all(each == contents[0] for each in contents)

    return check


@pytest.fixture
def scaled_step(tf):
    """Makes a weight of 1, its LossScaleOptimizer of SGD, and a step by `factor` times it."""

    def make(strategy, rate):
        with strategy.scope():
            weight = tf.keras.Variable([1.0])
            inner = tf.keras.optimizers.SGD(rate)
            optimizer = tf.keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
            optimizer.build([weight])

        def step(factor):
            optimizer.apply([factor * weight.value], [weight])

        return weight, optimizer, step

    return make
