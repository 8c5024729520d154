"""ClusterCoordinator: a chief that schedules `tf.function`s on workers."""

import threading

import numpy as np
import pytest

from tests.frameworks.tensorflow_strategies.served import run_workers

pytestmark = [pytest.mark.mpi, pytest.mark.timeout_seconds(300)]


def refuse():
    raise RuntimeError("it can't be read on a worker")


class Unreadable:
    """Can be pickled, but not unpickled."""

    number = 1

    def __reduce__(self):
        return refuse, ()


@pytest.mark.ranks(3)
def test_training(tf, ds, comm):
    """The tutorial's loop, with one worker: the numbers of one process."""

    def work(strategy):
        coordinator = ds.ClusterCoordinator(strategy)
        assert coordinator is ds.ClusterCoordinator(strategy)
        assert coordinator.strategy is strategy
        with strategy.scope():
            tf.keras.utils.set_random_seed(3)
            model = tf.keras.Sequential(
                [tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)]
            )
            model.build((None, 3))
            optimizer = tf.keras.optimizers.Adam(0.05)
            optimizer.build(model.trainable_variables)
            loss_object = tf.keras.losses.MeanSquaredError(reduction=None)
            mean = tf.keras.metrics.Mean()
            plain = tf.Variable([1.0, 2.0])
        first = [each.numpy() for each in model.trainable_variables]

        def dataset_fn(context):
            inputs = np.random.default_rng(context.input_pipeline_id).normal(size=(24, 3))
            inputs = inputs.astype(np.float32)
            pairs = inputs, inputs.sum(axis=1, keepdims=True)
            return tf.data.Dataset.from_tensor_slices(pairs).batch(4)

        @tf.function
        def per_worker_dataset_fn():
            return strategy.distribute_datasets_from_function(dataset_fn)

        @tf.function
        def step_fn(iterator):
            def replica_fn(inputs, targets):
                with tf.GradientTape() as tape:
                    per_example = loss_object(targets, model(inputs, training=True))
                    loss = tf.nn.compute_average_loss(per_example)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
                mean.update_state(loss)
                plain.assign_add([1.0, 1.0])
                return loss

            losses = strategy.run(replica_fn, args=next(iterator))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
        scheduled = [coordinator.schedule(step_fn, args=(iterator,)) for _ in range(6)]
        coordinator.join()
        losses = coordinator.fetch(scheduled)
        assert int(optimizer.iterations.numpy()) == 6
        np.testing.assert_allclose(float(mean.result()), np.mean(losses), rtol=1e-6)
        mean.reset_state()
        np.testing.assert_array_equal(plain.numpy(), [7.0, 8.0])
        coordinator.schedule(step_fn, args=(iterator,))
        with pytest.raises(tf.errors.OutOfRangeError):
            coordinator.join()

        alone = tf.keras.Sequential([tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)])
        alone.compile(tf.keras.optimizers.Adam(0.05), "mse")
        alone.build((None, 3))
        alone.set_weights(first)
        expected = [
            alone.train_on_batch(*each) for each in dataset_fn(tf.distribute.InputContext())
        ]
        np.testing.assert_allclose(losses[0], expected[0], rtol=1e-5)
        for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)

        @tf.function
        def until(limit):
            rows = tf.constant(0)
            for each in tf.data.Dataset.range(1, 9, output_type=tf.int32):
                if rows + each > limit:
                    break
                rows += each
            return rows

        # AutoGraph converts it on the worker, from its source.
        fetched = coordinator.schedule(until, args=(tf.constant(12),)).fetch()
        assert fetched == 10
        assert isinstance(fetched, np.integer)
        results = [coordinator.schedule(tf.function(lambda: mean.count + 1.0))]
        assert coordinator.fetch(results)[0] == 1.0
        with pytest.raises(TypeError, match=r"must be a tf\.function"):
            coordinator.schedule(lambda: 1)
        with pytest.raises(TypeError, match="dataset_fn is a dataset"):
            coordinator.create_per_worker_dataset(tf.data.Dataset.range(3))
        outside = tf.Variable(1.0)
        with pytest.raises(TypeError, match="outside of the scope"):
            coordinator.schedule(tf.function(lambda: outside + 1.0))
        with strategy.scope():
            model.compile("sgd", "mse")
        with pytest.raises(RuntimeError, match="work on the workers of a cluster without chief"):
            model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
        with strategy.scope():
            lazy = tf.keras.optimizers.Adam(0.1)

        @tf.function
        def builds():
            strategy.run(lambda: lazy.apply_gradients([(tf.ones(2), plain)]))

        coordinator.schedule(builds)
        with pytest.raises(RuntimeError, match=r"optimizer\.build"):
            coordinator.join()

    run_workers(ds, comm, work, chief=True)


@pytest.mark.ranks(3)
def test_functions_of_objects_and_of_threads(tf, ds, comm):
    """Methods, functions that refer to themselves, and new functions of several threads."""

    def work(strategy):
        coordinator = ds.ClusterCoordinator(strategy)
        with strategy.scope():
            weight = tf.Variable(2.0)

        class Decorated(tf.Module):
            def __init__(self):
                self.weight = weight

            @tf.function
            def step(self, value):
                return value + self.weight

        class Wrapped:
            def __init__(self):
                self.weight, self.step = weight, tf.function(self._step)

            def _step(self, value):
                return value * self.weight

        @tf.function
        def itself(number):
            return itself.python_function(number - 1) if number > 0 else tf.constant(7.0)

        def fetched(function, *args):
            return float(coordinator.schedule(function, args=args).fetch())

        assert fetched(Decorated().step, 1.0) == 3.0
        assert fetched(Wrapped().step, 3.0) == 6.0
        assert fetched(itself, 2) == 7.0
        rows = tf.function(lambda: tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1])))
        assert coordinator.schedule(rows).fetch().indices.numpy().tolist() == [1]

        with strategy.scope():
            layers = tf.keras.layers
            words = layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0)
            numbers = layers.IntegerLookup()
            numbers.adapt(np.array([[5], [3], [5]]))
            scaled = tf.keras.Sequential([tf.keras.Input((1,)), layers.Rescaling(0.5)])
        assert fetched(tf.function(lambda: words(tf.constant(["b"]))[0])) == 1
        assert fetched(tf.function(lambda: numbers(tf.constant([[5]]))[0, 0])) == 1
        assert fetched(tf.function(lambda: scaled(tf.ones((1, 1)))[0, 0])) == 0.5
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a"], [1]), default_value=-1
        )
        with pytest.raises(TypeError, match="as of a lookup table, belongs to one process"):
            fetched(tf.function(lambda: table.lookup(tf.constant("a"))))
        bad = Unreadable()
        for _ in range(2):
            # The worker goes on.
            with pytest.raises(RuntimeError, match="can't be read on a worker"):
                fetched(tf.function(lambda: tf.constant(bad.number)))
        assert fetched(itself, 1) == 7.0

        count, results = 4, {}
        together = threading.Barrier(count)
        # Large, so that packing one takes as long as another thread's turn.
        ballast = np.zeros(300_000)

        def schedule(number):
            @tf.function
            def function():
                return tf.constant(number) + tf.cast(ballast[0], tf.int32)

            together.wait()
            results[number] = fetched(function)

        threads = [threading.Thread(target=schedule, args=(each,)) for each in range(count)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert results == {each: each for each in range(count)}
        return True

    assert True in run_workers(ds, comm, work, chief=True)
