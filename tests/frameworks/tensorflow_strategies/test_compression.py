"""Gradients of Keras's optimizers are compressed between nodes, in `fit` and in custom loops."""

import numpy as np
import pytest

import collectives
import strategies
from tests.slow import slow

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.timeout_seconds(300)]

ROWS, BATCH = 26, 6


@pytest.fixture
def nodes(comm):
    """The ranks, each as if on a node of its own."""
    from mpi4py import MPI

    with collectives.Communicator(MPI.COMM_WORLD, deadline=60, node_of=[0, 1]) as spread:
        yield spread


@pytest.fixture
def strategy_of(ds, nodes):
    def make(compression):
        options = strategies.CommunicationOptions(compression=compression)
        return ds.MultiWorkerMirroredStrategy(None, options, communicator=nodes)

    return make


@pytest.mark.parametrize("traced", [False, True])
def test_a_batch_without_rows(tf, strategy_of, nodes, traced):
    """Its derivatives of batch normalization are 0 · NaN, its statistics NaN: none counts."""
    strategy = strategy_of("float16")
    layers = tf.keras.layers
    with strategy.scope():
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential(
            [layers.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
        )
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(inputs, training=True) ** 2) / 8
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda inputs: strategy.run(step, args=(inputs,)))
    if not traced:
        run = run.python_function
    before = [each.numpy() for each in model.trainable_variables]
    rows = tf.random.stateless_uniform((4, 3), (1, 2))
    expected = tf.math.reduce_variance(model.layers[0](rows), 0) * 0.01 + 0.99
    run(rows[: 0 if nodes.rank else 4])
    after = [each.numpy() for each in model.trainable_variables]
    assert all(np.isfinite(each).all() for each in after)
    assert not np.array_equal(before[-2], after[-2])
    np.testing.assert_allclose(model.non_trainable_variables[1], expected, rtol=1e-5)


def data():
    random = np.random.default_rng(3)
    words = random.integers(0, 9, (ROWS, 4))
    return words, (words.sum(1) / 16).astype(np.float32)


def model_of(tf):
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(5)
    return tf.keras.Sequential(
        [
            layers.Input((4,), dtype="int32"),
            layers.Embedding(9, 3),  # its gradients are IndexedSlices
            layers.Flatten(),
            layers.Dense(8, activation="tanh"),
            layers.Dense(1),
        ]
    )


def fitted(tf, strategy):
    with strategy.scope():
        model = model_of(tf)
        model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(*data(), batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


def looped(tf, strategy):
    """By an optimizer that is of no compiled model; the last batches are short."""
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    distributed = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        model = model_of(tf)
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)

    @tf.function
    def step(words, labels):
        rows = tf.distribute.get_replica_context().all_reduce("SUM", tf.shape(words)[0])
        with tf.GradientTape() as tape:
            errors = tf.square(model(words)[:, 0] - labels)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for _ in range(3):
        for batch in distributed:
            strategy.run(step, args=batch)
    return model.get_weights()


@pytest.mark.parametrize("trained", [fitted, *slow(looped)])
def test_gradients(tf, ds, strategy_of, equal_on_all, trained):
    """`topk(1)` leaves nothing out: weights are those of one process."""
    strategy = strategy_of("topk(1)")
    found = trained(tf, strategy)
    for one, other in zip(found, trained(tf, ds.OneDeviceStrategy("/cpu:0")), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    equal_on_all(found)
    dense = sum(each.size for each in found[1:])
    assert strategy.compressed.bytes_between_nodes == 8 * dense, "values and positions"


def test_lists_of_one_optimizer(tf, strategy_of, nodes):
    """Gradients of other variables of the same shapes are a list of their own."""
    strategy = strategy_of("topk(0.5)")
    with strategy.scope():
        ones = [tf.Variable([0.0, 0.0]) for _ in range(3)]
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build(ones)

    def step(number):
        """The larger element moves; the smaller one is left out, and added to the next step."""
        gradient = tf.constant([1.75, 2.0 + nodes.rank])
        optimizer.apply_gradients([(gradient, ones[number])])

    strategy.run(step, args=(0,))
    strategy.run(step, args=(2,))
    np.testing.assert_array_equal(
        np.stack([each.numpy() for each in ones]), [[0, -5], [0, 0], [0, -5]]
    )
    strategy.run(step, args=(2,))
    np.testing.assert_array_equal(ones[2], [-7, -5])


def test_reductions_of_the_program_are_exact(tf, strategy_of, nodes):
    strategy = strategy_of("topk(0.5)")
    own = np.array([1, 10], np.float32) * (nodes.rank + 1)
    found = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(own))
    )
    np.testing.assert_array_equal(found, [3, 30])
