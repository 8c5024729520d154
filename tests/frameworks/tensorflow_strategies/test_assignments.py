"""Variables that a replica assigns without an optimizer: equal on all ranks, or refused."""

import contextlib
import gc
import threading

import numpy as np
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.timeout_seconds(120)]


def test_of_keras(tf, strategy, comm):
    with strategy.scope():
        weight = tf.keras.Variable([1.0], name="weight")
        rows = tf.keras.Variable(0, dtype="int64", trainable=False, name="rows")
        twice = tf.keras.Variable(0, dtype="int64", trainable=False, aggregation="sum")
        summed = tf.keras.Variable(
            0, dtype="int64", trainable=False, aggregation="sum", synchronization="on_read"
        )
        first = tf.keras.Variable(0.0, trainable=False, aggregation="only_first_replica")
        frozen = tf.keras.Variable([1.0])
        frozen.trainable = False
        seeds = tf.keras.random.SeedGenerator(3)

    def refused():
        with pytest.raises(ValueError, match=r"'weight' has aggregation NONE.*optimizer's apply"):
            weight.assign_sub([0.1 * comm.rank])
        with pytest.raises(ValueError, match=r"'rows' has aggregation NONE.*aggregation='sum'"):
            rows.assign_add(comm.rank + 1)
        with pytest.raises(ValueError, match=r"aggregation SUM.*synchronization='on_read'"):
            twice.assign_add(comm.rank + 1)

    def step():
        summed.assign_add(comm.rank + 1)
        first.assign(comm.rank + 5.0)
        frozen.assign([comm.rank + 1.0])
        seeds.next()

    strategy.run(refused)
    tf.function(lambda: strategy.run(refused))()
    for run in (lambda: strategy.run(step), tf.function(lambda: strategy.run(step))):
        run()
        np.testing.assert_allclose(frozen.numpy(), [(comm.size + 1) / 2])
        assert float(first.numpy()) == 5.0
    assert int(summed.numpy()) == comm.size * (comm.size + 1)
    np.testing.assert_array_equal(seeds.state.numpy(), [3, 2])
    assert float(weight.numpy()[0]) == 1.0


def test_by_one_replica(tf, ds):
    strategy = ds.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        variable, count = tf.Variable(1.0), tf.keras.Variable(0, dtype="int64")

    def step():
        variable.assign_add(2.0)
        count.assign_add(1)

    strategy.run(step)
    tf.function(lambda: strategy.run(step))()
    assert (float(variable.numpy()), int(count.numpy())) == (5.0, 2)


def test_statistics_of_a_function_that_another_thread_traced(tf, strategy, comm):
    with strategy.scope():
        statistic = tf.keras.Variable([0.0], trainable=False)

    @tf.function
    def step(value):
        statistic.assign(statistic + value)

    own = tf.constant([comm.rank + 1.0])
    tracing = threading.Thread(target=lambda: strategy.run(step, args=(own,)))
    tracing.start()
    tracing.join()
    mean = (comm.size + 1) / 2
    np.testing.assert_allclose(statistic.numpy(), [mean])
    strategy.run(lambda: step(own))
    np.testing.assert_allclose(statistic.numpy(), [2 * mean])
    tf.function(lambda: strategy.run(step, args=(own,)))()
    np.testing.assert_allclose(statistic.numpy(), [3 * mean])
    functions = strategy.extended.statistics._functions
    assert len(functions)
    step = tracing = None  # noqa: F811
    gc.collect()
    assert not len(functions)


def test_a_step_that_one_rank_scales_to_infinity(tf, strategy, comm, scaled_step):
    weight, optimizer, step = scaled_step(strategy, 1.0)
    infinite = tf.constant([np.inf if comm.rank else 1.0])

    def in_scope(*args, **kwargs):
        # Each scope wraps the method of Keras.
        with strategy.scope() if comm.rank else contextlib.nullcontext():
            return strategy.run(*args, **kwargs)

    for run in (strategy.run, tf.function(strategy.run), in_scope):
        before, scale = weight.numpy(), float(optimizer.dynamic_scale.numpy())
        run(step, args=(infinite,))
        np.testing.assert_array_equal(weight.numpy(), before)
        assert float(optimizer.dynamic_scale.numpy()) == scale / 2
        run(step, args=(tf.constant([1.0]),))
        np.testing.assert_allclose(weight.numpy(), before * (1 - comm.size / (scale / 2)))


def test_overflows_of_a_batch_without_rows_do_not_count(tf, strategy, comm, equal_on_all):
    """Batch normalization's gradients are NaN there."""
    with strategy.scope():
        layers = [tf.keras.Input((3,)), tf.keras.layers.BatchNormalization()]
        model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(1)])
        inner = tf.keras.optimizers.SGD(0.1)
        optimizer = tf.keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
        optimizer.build(model.trainable_variables)

    def step(batch):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(model(batch, training=True)) / 4)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    batch = tf.random.stateless_normal((0 if comm.rank else 4, 3), (1, 2))
    before = float(model.layers[-1].bias.numpy()[0])
    for run in (strategy.run, tf.function(strategy.run)):
        run(step, args=(batch,))
    assert float(optimizer.dynamic_scale.numpy()) == 4
    assert float(model.layers[-1].bias.numpy()[0]) < before
    equal_on_all(model.get_weights())


def test_a_weight_that_is_frozen_after_it_was_made(tf, strategy, comm):
    """What `run` assigns to it is averaged by the reduction of the step."""
    with strategy.scope():
        frozen, weight = tf.keras.Variable([1.0]), tf.keras.Variable([1.0])
        frozen.trainable = False
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    def step():
        frozen.assign([comm.rank + 1.0])
        optimizer.apply([tf.constant([1.0])], [weight])

    for run in (strategy.run, tf.function(strategy.run)):
        run(step)
        np.testing.assert_allclose(frozen.numpy(), [(comm.size + 1) / 2])
    np.testing.assert_allclose(weight.numpy(), [1 - 0.2 * comm.size], rtol=1e-6)
