"""Training equals one process with the whole batch; all ranks have the same bits."""

import numpy as np
import pytest

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    pytest.mark.timeout_seconds(300),
    # Of TensorFlow's own distributed datasets in a function.
    pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options"),
]

ROWS, BATCH = 50, 12


def data():
    random = np.random.default_rng(7)
    inputs = random.normal(size=(ROWS, 8, 8, 1)).astype(np.float32)
    return inputs, random.integers(0, 5, ROWS)


def model_of(tf):
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(5)
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(5, kernel_constraint=tf.keras.constraints.MaxNorm(1.5)),
        ]
    )


def trained(tf, strategy, epochs=4):
    """Five steps an epoch, of which the last has a short batch; in one function an epoch."""
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    distributed = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        model = model_of(tf)
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(batch):
        inputs, labels = batch
        rows = tf.distribute.get_replica_context().all_reduce("SUM", tf.shape(inputs)[0])
        with tf.GradientTape() as tape:
            predictions = model(inputs, training=True)
            losses = loss_of(labels, predictions)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    @tf.function
    def epoch(batches):
        total = 0.0
        for batch in batches:
            total += strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
        return total

    @tf.function
    def one_step(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    losses = [float(epoch(distributed)) for _ in range(epochs // 2)]
    losses += [float(sum(map(one_step, distributed))) for _ in range(epochs // 2)]
    return model.get_weights(), losses, float(accuracy.result())


def test_a_custom_loop(tf, ds, strategy, comm, equal_on_all):
    weights, losses, accuracy = trained(tf, strategy)
    alone, losses_alone, accuracy_alone = trained(tf, ds.OneDeviceStrategy("/cpu:0"))
    for one, other in zip(weights, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_allclose(losses, losses_alone, rtol=1e-5)
    assert accuracy == pytest.approx(accuracy_alone)
    equal_on_all(weights)


def test_batch_normalization(tf, strategy, comm, equal_on_all):
    """Its statistics are the ranks' mean, which one process would have had."""
    with strategy.scope():
        layer = tf.keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 3))
    own = tf.reshape(tf.range(6, dtype=tf.float32), [2, 3]) * (comm.rank + 1)
    mean = np.zeros(3)
    step = tf.function(lambda: strategy.run(lambda: layer(own, training=True)))
    for run in (lambda: strategy.run(lambda: layer(own, training=True)), step, step):
        run()
        batch = np.mean([[1.5, 2.5, 3.5]], axis=0) * (comm.size + 1) / 2
        mean = 0.5 * mean + 0.5 * batch
        np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-5)
    equal_on_all([each.numpy() for each in layer.variables])
    # In a function that only the first run traces.
    traced = tf.function(lambda: layer(own, training=True))
    for _ in range(2):
        strategy.run(traced)
        mean = 0.5 * mean + 0.5 * batch
        np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-5)
    equal_on_all([each.numpy() for each in layer.variables])


@pytest.mark.parametrize("traced", ["not", "the epoch", "the step"])
def test_batch_normalization_of_a_rank_without_rows(tf, ds, comm, traced):
    """Its statistics and gradients don't count; then those of real NaN do."""
    rows = 2 * BATCH + 1  # the last batch has a row, for the first rank
    inputs = np.random.default_rng(3).normal(size=(rows, 3)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices(inputs).batch(BATCH)
    for strategy in (
        ds.MultiWorkerMirroredStrategy(communicator=comm),
        ds.LocalSGDStrategy(1, communicator=comm),
    ):
        with strategy.scope():
            model = tf.keras.Sequential(
                [tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
            )
            model.build((None, 3))
            optimizer = tf.keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)

        def step(batch, _, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(
                    model(batch, training=True)[:, 0] ** 2, global_batch_size=BATCH
                )
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        run = tf.function(step) if traced == "the step" else step
        distributed = strategy.experimental_distribute_dataset(dataset)

        def epoch(strategy=strategy, run=run, distributed=distributed):
            for batch in distributed:
                strategy.run(run, args=(batch, tf.constant([1.0, 2.0])))

        (tf.function(epoch) if traced == "the epoch" else epoch)()
        assert all(np.isfinite(each).all() for each in model.get_weights())
        # Of NumPy, and in the end with a NaN in a row, which counts.
        for batch in (
            inputs[: 2 * (comm.rank == 0)],
            inputs[:2] * [1, 1 if comm.rank else np.nan, 1],
        ):
            before = model.get_weights()
            strategy.run(run, args=(batch.astype(np.float32), [1.0]))
        assert all(np.isfinite(each).all() for each in before)
        gamma, _, mean, *_ = model.get_weights()
        assert np.isnan(gamma[1])
        np.testing.assert_array_equal(np.isnan(mean), [False, True, False])


def test_a_step_reduces_once(tf, strategy, comm, monkeypatch):
    """The gradients and the statistics of all layers."""
    calls = []
    reduce = type(strategy.array_strategy).all_reduce_arrays

    def counted(self, arrays, *rest, **named):
        calls.append(len(arrays))
        return reduce(self, arrays, *rest, **named)

    monkeypatch.setattr(type(strategy.array_strategy), "all_reduce_arrays", counted)
    layers = tf.keras.layers
    with strategy.scope():
        model = tf.keras.Sequential(
            [layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
        )
        model.build((None, 2))
        optimizer = tf.keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
    calls.clear()

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([4, 2]) * (comm.rank + 1.0), training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    function = tf.function(lambda: strategy.run(step))
    for _ in range(3):
        function()
    strategy.run(step)
    assert calls == [6 + 2] * 4


@pytest.mark.ranks(2)
def test_keras_fit(tf, ds, strategy, comm, tmp_path, capsys, equal_on_all):
    """As one process; the chief alone prints and writes, and all ranks stop at once."""

    class Stop(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1 and comm.rank == comm.size - 1

    def fitted(strategy):
        inputs, labels = data()
        with strategy.scope():
            model = model_of(tf)
            model.compile(
                tf.keras.optimizers.Adam(0.01),
                tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        dataset = tf.data.Dataset.from_tensor_slices((inputs[:48], labels[:48])).batch(12)
        callbacks = [tf.keras.callbacks.CSVLogger(tmp_path / "log.csv"), Stop()]
        epochs = 3 if strategy.num_replicas_in_sync > 1 else 2
        how = {"epochs": epochs, "verbose": 2, "shuffle": False, "validation_data": dataset}
        history = model.fit(dataset, callbacks=callbacks, **how)
        evaluated = model.evaluate(inputs, labels, batch_size=10, verbose=0)
        return model.get_weights(), [*history.history.values()], evaluated

    weights, history, evaluated = fitted(strategy)
    assert (capsys.readouterr().out != "") == (tmp_path / "log.csv").exists() == (comm.rank == 0)
    alone, history_alone, evaluated_alone = fitted(ds.OneDeviceStrategy("/cpu:0"))
    for one, other in zip(weights, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_allclose(history, history_alone, rtol=1e-4)
    np.testing.assert_allclose(evaluated, evaluated_alone, rtol=1e-4)
    equal_on_all(weights)


def test_older_optimizers(tf, strategy, comm):
    """Those of TensorFlow 1, whose gradients are reduced in `merge_call`."""
    with strategy.scope():
        weights, others = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
        momentum = tf.compat.v1.train.MomentumOptimizer(0.5, 0.9)
        adam = tf.compat.v1.train.AdamOptimizer(0.5)  # has variables that belong to no weight
    gradient = tf.constant([1.0, comm.rank + 1.0])

    def step():
        momentum.apply_gradients([(gradient, weights)])
        adam.apply_gradients([(gradient, others)])

    tf.function(lambda: strategy.run(step))()
    total = comm.size * (comm.size + 1) / 2
    np.testing.assert_allclose(weights, [1 - 0.5 * comm.size, 2 - 0.5 * total])
    np.testing.assert_allclose(others, [0.5, 1.5], rtol=1e-5)


def test_sparse_gradients(tf, strategy, comm, equal_on_all):
    with strategy.scope():
        table = tf.keras.layers.Embedding(6, 2)
        table.build((None,))
        optimizer = tf.keras.optimizers.SGD(1.0)
    before = table.embeddings.numpy().copy()

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(tf.constant([comm.rank, 5])))
        (gradient,) = tape.gradient(loss, table.trainable_variables)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply_gradients([(gradient, table.embeddings)])

    tf.function(lambda: strategy.run(step))()
    before[: comm.size] -= 1
    before[5] -= comm.size
    np.testing.assert_allclose(table.embeddings.numpy(), before, rtol=1e-6)
    equal_on_all([table.embeddings.numpy()])


def test_random_numbers(tf, strategy, comm, equal_on_all):
    """Equal outside of run, where datasets are shuffled; each replica's own inside."""
    with strategy.scope():
        dropout = tf.keras.layers.Dropout(0.5, seed=3)
    outside = tf.data.Dataset.range(20).shuffle(20).batch(20)
    for _ in range(2):
        orders = comm.all_gather_object([each.numpy().tolist() for each in outside])
        assert all(each == orders[0] for each in orders)
    for call in (tf.function, lambda fn: fn):
        for draw in (
            lambda: tf.random.uniform([3]),
            lambda: tf.keras.random.uniform([3]),
            lambda: dropout(tf.ones([64]), training=True),
        ):
            drawn = call(lambda draw=draw: strategy.run(draw))().numpy().tolist()
            assert len({tuple(each) for each in comm.all_gather_object(drawn)}) == comm.size
    equal_on_all([dropout.seed_generator.state.numpy()])
