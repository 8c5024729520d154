"""ResNet-50 of Keras's applications under five strategies, on small images made here."""

import numpy as np
import pytest

from tests.frameworks.tensorflow_strategies.served import run_workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    pytest.mark.timeout_seconds(600),
    pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options"),
]

BATCH, STEPS, CLASSES = 4, 2, 10


def images():
    random = np.random.default_rng(7)
    inputs = random.normal(size=(BATCH * STEPS, 32, 32, 3)).astype(np.float32)
    return inputs, np.eye(CLASSES, dtype=np.float32)[random.integers(0, CLASSES, BATCH * STEPS)]


def network(tf, strategy, *, trains_statistics):
    """Compiled as in the tutorial, but for SGD, since Adam enlarges rounding."""
    tf.keras.utils.set_random_seed(11)
    with strategy.scope():
        model = tf.keras.applications.ResNet50(
            weights=None, input_shape=(32, 32, 3), classes=CLASSES
        )
        if not trains_statistics:
            for layer in model.layers:
                if isinstance(layer, tf.keras.layers.BatchNormalization):
                    layer.trainable = False
        optimizer = tf.keras.optimizers.SGD(1e-3)
        model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])
    return model


def fitted(tf, strategy, *, trains_statistics):
    """The weights, and the losses of training and of `evaluate`, with two steps."""
    model = network(tf, strategy, trains_statistics=trains_statistics)
    data = tf.data.Dataset.from_tensor_slices(images()).batch(BATCH)
    history = model.fit(data, epochs=1, shuffle=False, verbose=0)
    evaluated = model.evaluate(data, verbose=0)
    return model.get_weights(), [history.history["loss"][0], evaluated[0]]


def of_a_worker(tf, ds, comm, alone):
    """A worker and a parameter server: one process's numbers, also where statistics train."""
    weights, losses = fitted(tf, alone, trains_statistics=True)

    def work(strategy):
        found, found_losses = fitted(tf, strategy, trains_statistics=True)
        np.testing.assert_allclose(found_losses[0], losses[0], rtol=1e-4)
        for one, other in zip(found, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)

    run_workers(ds, comm, work)


def test_residual_network(tf, ds, comm, equal_on_all):
    """The same bits on every rank; the loss of one process where statistics do not train.

    Each replica normalizes by its own rows in training, so that the losses are compared with
    BatchNormalization in inference mode: then they are means over the rows alone.
    """
    alone = ds.OneDeviceStrategy("/cpu:0")
    weights, losses = fitted(tf, alone, trains_statistics=False)
    for made in (
        ds.MirroredStrategy(communicator=comm),
        ds.MultiWorkerMirroredStrategy(communicator=comm),
        ds.CentralStorageStrategy(communicator=comm),
    ):
        found, found_losses = fitted(tf, made, trains_statistics=False)
        equal_on_all([*found, *found_losses])
        np.testing.assert_allclose(found_losses, losses, rtol=1e-4)
        for one, other in zip(found, weights, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    # A variance over two rows makes the first steps so large that `evaluate` overflows, in one
    # process with batches of two as well.
    found, (loss, _) = fitted(tf, made, trains_statistics=True)
    of_a_worker(tf, ds, comm, alone)
    equal_on_all([*found, loss])
    assert all(np.isfinite(each).all() for each in [*found, loss])
    assert loss != pytest.approx(losses[0])
