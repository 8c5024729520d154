"""Keras's `fit`, `evaluate` and `predict` equal one process where batches do not divide."""

import functools
import itertools
import warnings

import numpy as np
import pytest

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    pytest.mark.timeout_seconds(200),
    # Of TensorFlow's own distributed datasets in a function.
    pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options"),
]

ROWS = 21


def data():
    random = np.random.default_rng(3)
    inputs = random.normal(size=(ROWS, 3)).astype(np.float32)
    return inputs, inputs @ np.array([[1.0], [-2.0], [0.5]], np.float32) + inputs[:, :1] ** 2


def fitted(tf, strategy, optimizer=None, loss="mse", batch_size=5, **options):
    """Weights, history and what `evaluate` returns; the last batch has a single row."""
    keras = tf.keras
    layers, inputs = keras.layers, data()
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [layers.Dense(4, "tanh", kernel_regularizer="l2"), layers.Dense(1)]
        )
        optimizer = optimizer() if optimizer else keras.optimizers.SGD(0.05)
        model.compile(optimizer, loss, metrics=["mae"], **options)
    how = {"batch_size": batch_size, "verbose": 0}
    history = model.fit(*inputs, epochs=3, shuffle=False, validation_data=inputs, **how)
    return [*model.get_weights(), *history.history.values(), model.evaluate(*inputs, **how)]


def assert_as_alone(tf, ds, strategy, equal_on_all, **how):
    found = fitted(tf, strategy, **how)
    alone = fitted(tf, ds.OneDeviceStrategy("/cpu:0"), **how)
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    equal_on_all(found)


def test_uneven_batches(tf, ds, strategy, equal_on_all):
    assert_as_alone(tf, ds, strategy, equal_on_all)


@pytest.mark.parametrize(
    "clip",
    [
        {"clipnorm": 0.3},
        pytest.param({"global_clipnorm": 0.3}, marks=pytest.mark.slow),
        pytest.param({"clipvalue": 0.1}, marks=pytest.mark.slow),
    ],
    ids=lambda clip: next(iter(clip)),
)
def test_clipping_follows_the_reduction(tf, ds, strategy, equal_on_all, clip):
    optimizer = lambda: tf.keras.optimizers.SGD(0.5, **clip)  # noqa: E731
    assert_as_alone(tf, ds, strategy, equal_on_all, optimizer=optimizer)


def test_optimizers_within_one(tf, ds, strategy, equal_on_all):
    """They are known when it is built."""

    def optimizer():
        found = [tf.keras.optimizers.SGD(rate) for rate in (0.05, 0.01)]
        return tf.keras.optimizers.MultiOptimizer(lambda variable: found[variable.shape[0] > 3])

    assert_as_alone(tf, ds, strategy, equal_on_all, optimizer=optimizer)


def test_values_in_the_place_of_gradients(tf, ds, strategy, equal_on_all):
    """Those of float8's statistics are maxima over the batch; those of gradients over its parts."""
    largest = []
    for each in (strategy, ds.OneDeviceStrategy("/cpu:0")):
        tf.keras.utils.set_random_seed(5)
        with each.scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for each layer without weights
            model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
            model.quantize("float8")
            model.compile("sgd", "mse")
        model.fit(*data(), batch_size=5, epochs=2, shuffle=False, verbose=0)
        largest.append(model.layers[0].inputs_amax_history.numpy().max())
        if each is strategy:
            equal_on_all(model.get_weights())
    assert largest[0] == largest[1] > 1, largest


@pytest.mark.slow
def test_accumulation_and_loss_scales(tf, ds, strategy, equal_on_all):
    def optimizer():
        inner = tf.keras.optimizers.Adam(0.05, clipnorm=0.3, gradient_accumulation_steps=2)
        return tf.keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)

    assert_as_alone(tf, ds, strategy, equal_on_all, optimizer=optimizer)


@pytest.mark.slow
def test_steps_of_one_execution(tf, ds, strategy, equal_on_all):
    assert_as_alone(tf, ds, strategy, equal_on_all, steps_per_execution=2)
    assert_as_alone(tf, ds, strategy, equal_on_all, run_eagerly=True)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_end_of_data_is_no_step(tf, ds, comm):
    """Keras looks for a further batch where it doesn't know that there is none."""
    rows = np.ones((16, 3), np.float32)
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1]))
    of_any_length = data.filter(lambda *_: True).batch(4)
    for kind, given, steps in (
        (ds.MultiWorkerMirroredStrategy, of_any_length, 4),
        (functools.partial(ds.LocalSGDStrategy, 2), data.batch(4), 4 // comm.size),
    ):
        with kind(communicator=comm).scope():
            model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(given, epochs=2, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 2 * steps


def test_datasets_with_other_numbers_of_batches(tf, strategy, comm, equal_on_all):
    """Each rank's own rows: an epoch has as many steps as the longest dataset has batches."""
    rows = 8 * np.arange(1.0, 41.0, dtype=np.float32)[:, None] ** -1
    data = tf.data.Dataset.from_tensor_slices((rows, 2 * rows)).batch(4).take(4 + comm.rank)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    given = data.with_options(options)
    history = model.fit(given, epochs=2, verbose=0, validation_data=given).history
    assert int(model.optimizer.iterations.numpy()) == 2 * (4 + comm.size - 1)
    found = model.evaluate(given, verbose=0)
    assert history["val_loss"][-1] == pytest.approx(found[0])
    equal_on_all([*found, *model.get_weights()])


def test_ranks_that_compile_or_end_differently(tf, strategy, comm):
    """Weights that each rank has changed by itself are noticed when `fit` ends."""

    def clipped():
        return tf.keras.optimizers.SGD(0.05, clipnorm=0.1 * (1 + comm.rank))

    with pytest.raises(ValueError, match="compiled the model differently"):
        fitted(tf, strategy, clipped)

    class AssignsLast(tf.keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            # An assignment of the variable would be every rank's.
            for part in self.model.layers[1].bias.value._values:
                part.assign_add([1.0 + comm.rank])

    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(4), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="weights differ at the end of training"):
        model.fit(*data(), verbose=0, callbacks=[AssignsLast()])


def test_losses_that_are_sums(tf, ds, strategy, equal_on_all):
    how = {
        "loss": tf.keras.losses.MeanSquaredError(reduction="sum"),
        "optimizer": lambda: tf.keras.optimizers.SGD(0.01),
        "batch_size": 6,
    }
    found = fitted(tf, strategy, **how)[:4]
    alone = fitted(tf, ds.OneDeviceStrategy("/cpu:0"), **how)[:4]
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    equal_on_all(found)


def test_losses_that_cannot_be_as_one_process(tf, strategy):
    losses, layers = tf.keras.losses, tf.keras.layers
    with strategy.scope():
        entry = tf.keras.Input((3,))
        model = tf.keras.Model(entry, [layers.Dense(1)(entry), layers.Dense(1)(entry)])
    weighted = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with strategy.scope():
        with pytest.raises(ValueError, match="reduction='mean_with_sample_weight'"):
            model.compile("sgd", [weighted, "mse"])
        with pytest.raises(ValueError, match="must all be sums or all be means"):
            model.compile("sgd", [losses.MeanSquaredError(reduction="sum"), "mse"])


def test_predictions(tf, strategy, comm, equal_on_all):
    """All rows in their order, whatever the form of data and outputs; a rank may have none."""
    layers = tf.keras.layers
    with strategy.scope():
        entry = tf.keras.Input((3,))
        hidden = layers.Reshape((-1, 1))(layers.Dense(2)(entry))
        outputs = {"sum": layers.Dense(1)(entry), "pair": hidden}
        model = tf.keras.Model(entry, outputs)
    inputs, _ = data()
    expected = {name: each.numpy() for name, each in model(inputs).items()}
    dataset = tf.data.Dataset.from_tensor_slices(inputs).batch(5)
    ways = (inputs, {"batch_size": 5}), (dataset, {}), (inputs, {"steps": 1})
    for compiled, (given, how) in itertools.product((False, True), ways):
        if compiled and not model.compiled:
            with strategy.scope():
                model.compile("sgd", "mse")
        found = model.predict(given, verbose=0, **how)
        assert found.keys() == expected.keys()
        for name, each in found.items():
            rows = expected[name] if "steps" not in how else expected[name][: len(each)]
            np.testing.assert_allclose(each, rows, atol=1e-6)
        equal_on_all(found.values())
    # That of a rank's own rows is not collective.
    if comm.rank == 0:
        assert len(model.predict_on_batch(inputs[:4])["sum"]) == 4


def test_recurrent_state_is_each_ranks_own(tf, ds, strategy, comm):
    rows = np.random.default_rng(4).normal(size=(2 * comm.size, 4, 2)).astype(np.float32)

    def predicted(under, size):
        layers = tf.keras.layers
        tf.keras.utils.set_random_seed(1)
        with under.scope():
            recurrent = layers.LSTM(2, stateful=True)
            model = tf.keras.Sequential([layers.Input((2, 2), size), recurrent])
            model.compile("sgd", "mse")
        return [
            model.predict(rows[:, part], batch_size=2 * comm.size, verbose=0)
            for part in (slice(2), slice(2, None))
        ]

    alone = predicted(ds.OneDeviceStrategy("/cpu:0"), 2 * comm.size)
    np.testing.assert_allclose(predicted(strategy, 2), alone, atol=1e-6)


def test_predictions_of_a_models_own(tf, strategy):
    """A `predict` of the class, and a step of the instance, compiled or not."""

    class Own(tf.keras.Model):
        def call(self, rows):
            return rows

        def predict(self, rows, temperature=1.0):
            return temperature * super().predict(rows, verbose=0)

    with strategy.scope():
        model = Own()
    rows = np.arange(7.0, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(model.predict(rows, temperature=2.0), 2 * rows)
    with strategy.scope():
        model.compile("sgd", "mse")
    model.predict_step = lambda data: data + 1.0
    np.testing.assert_array_equal(model.predict(rows), rows + 1)


def test_batch_normalization(tf, ds, strategy, equal_on_all):
    """Synchronized, it is as one process; else statistics are finite though a rank has no rows."""
    layers = tf.keras.layers

    def trained(strategy, rows, synchronized):
        tf.keras.utils.set_random_seed(5)
        with strategy.scope():
            layer = layers.BatchNormalization(momentum=0.5, synchronized=synchronized)
            model = tf.keras.Sequential([layer, layers.Dense(1)])
            model.compile(tf.keras.optimizers.SGD(0.05), "mse")
        inputs, wanted = (each[:rows] for each in data())
        model.fit(inputs, wanted, batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    found = trained(strategy, ROWS - 1, synchronized=True)
    alone = trained(ds.OneDeviceStrategy("/cpu:0"), ROWS - 1, synchronized=False)
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    equal_on_all(found)
    own = trained(strategy, ROWS, synchronized=False)
    assert all(np.isfinite(each).all() for each in own)
    equal_on_all(own)


def test_the_order_of_a_py_dataset(tf, strategy, comm):
    """The same on all ranks, though only the chief's is random."""

    class Numbers(tf.keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return np.full((comm.size, 2), index, np.float32), np.zeros((comm.size, 1), np.float32)

    seen = []

    class Model(tf.keras.Sequential):
        def train_step(self, data):
            seen.append(float(data[0].numpy()[0, 0]))
            return super().train_step(data)

    np.random.seed(comm.rank)
    with strategy.scope():
        model = Model([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(Numbers(), epochs=2, verbose=0, shuffle=True)
    orders = comm.all_gather_object(seen)
    assert all(each == orders[0] for each in orders)
    assert sorted(seen) == sorted([*range(6)] * 2) != seen


def test_a_step_of_the_program(tf, ds, strategy, equal_on_all):
    """Gradients of its own loss are summed; logs other than metrics are averaged by rows."""

    class Model(tf.keras.Sequential):
        def build(self, shape):
            super().build(shape)
            self.tracked = [tf.keras.metrics.Mean("tracked"), tf.keras.metrics.Mean("left_out")]

        def train_step(self, data):
            inputs, wanted = data
            with tf.GradientTape() as tape:
                errors = (self(inputs, training=True) - wanted) ** 2
                loss = tf.nn.compute_average_loss(errors[:, 0], global_batch_size=5)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            error = tf.reduce_mean(errors)
            for metric in self.tracked:
                metric.update_state(errors)
            nested = {"twice": 2 * error}
            tracked = self.tracked[0].result()
            return {"error": error, "nested": nested, "tracked": tracked, "loss": 3 * error}

    def trained(strategy):
        tf.keras.utils.set_random_seed(5)
        with strategy.scope():
            model = Model([tf.keras.layers.Dense(1)])
            model.compile(tf.keras.optimizers.SGD(0.05))
        history = model.fit(*data(), batch_size=5, epochs=2, shuffle=False, verbose=0)
        found = history.history
        np.testing.assert_allclose(2 * np.array(found["error"]), found["twice"], rtol=1e-6)
        assert set(found) == {"error", "twice", "tracked", "loss"}
        np.testing.assert_allclose(3 * np.array(found["error"]), found["loss"], rtol=1e-6)
        return [*model.get_weights(), found["error"], found["tracked"]]

    found = trained(strategy)
    for one, other in zip(found, trained(ds.OneDeviceStrategy("/cpu:0")), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    equal_on_all(found)


@pytest.mark.parametrize("kind", ["SparseTensor", "RaggedTensor"])
def test_arrays_whose_rows_are_not_sliced_are_refused(tf, strategy, kind):
    """Datasets of them work."""
    rows = np.eye(6, 3, dtype=np.float32)
    make = tf.sparse.from_dense if kind == "SparseTensor" else tf.RaggedTensor.from_tensor
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(TypeError, match=f"the data are a {kind}.*give a tf.data.Dataset"):
        model.fit(make(rows), rows[:, :1], verbose=0)


def test_models_of_other_backends_compile(tf, strategy):
    """Once a scope was entered; they have no strategy of TensorFlow's."""
    from keras.src.trainers.trainer import Trainer

    class Other(Trainer):
        def _flatten_layers(self):
            return []

    with strategy.scope():
        pass
    model = Other()
    assert not hasattr(model, "_distribute_strategy")
    model.compile(optimizer="sgd", loss="mse", auto_scale_loss=False)
    assert model.compiled


def test_a_model_of_no_scope_is_refused(tf, strategy):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    with strategy.scope(), pytest.raises(ValueError, match="made outside of the scope"):
        model.compile("sgd", "mse")


@pytest.mark.parametrize("own_arguments", [False, True])
def test_a_model_that_is_compiled_outside_of_the_scope(
    tf, ds, strategy, comm, equal_on_all, own_arguments
):
    """The first time, and again; by a method with arguments of its own.

    The model has another name on each rank, which the slots of Keras's optimizers contain.
    """
    keras = tf.keras

    class Own(keras.Sequential):
        def compile(self, descent):
            super().compile(optimizer=descent, loss="mse")

    def trained(strategy):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            layers, name = [keras.layers.Dense(1)], "on_" + "abc"[comm.rank % 3]
            model = (Own if own_arguments else keras.Sequential)(layers, name=name)
        found, how = [], {"batch_size": 5, "verbose": 0}
        if own_arguments:
            model.compile(descent=keras.optimizers.SGD(0.05))
            history = model.fit(*data(), epochs=2, shuffle=False, **how).history
            return [*history.values(), *model.get_weights()]
        for loss in ("mse", "mae"):
            model.compile("adam", loss, metrics=["mae"])
            history = model.fit(*data(), epochs=2, shuffle=False, **how).history
            found += [*history.values(), model.evaluate(*data(), **how)]
        return [*found, *model.get_weights()]

    found = trained(strategy)
    for one, other in zip(found, trained(ds.OneDeviceStrategy("/cpu:0")), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    equal_on_all(found)


def test_metrics_of_no_scope_are_refused(tf, strategy):
    """Each rank's would be its own."""
    keras, own = tf.keras, tf.keras.metrics.BinaryAccuracy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        for given in ({"metrics": [own]}, {"weighted_metrics": {"a": ["mae", own]}}):
            with pytest.raises(ValueError, match="metric 'binary_accuracy' was made outside of"):
                model.compile("sgd", "mse", **given)
        model.compile("sgd", "mse", metrics=[keras.metrics.BinaryAccuracy()])
    with pytest.raises(ValueError, match="metric 'binary_accuracy' was made outside of"):
        model.compile("sgd", "mse", metrics=[own])


def test_a_model_of_another_backend_is_refused(tf, strategy, monkeypatch):
    import keras

    model = keras.Sequential([keras.layers.Dense(1)])
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with strategy.scope(), pytest.raises(TypeError, match="of Keras's backend 'torch': must be"):
        model.compile("sgd", "mse")


@pytest.mark.parametrize("together", [1, 2])
def test_a_generator_of_validation_data_goes_on(tf, strategy, together):
    """Without what is read ahead. Batch i has the value i; Keras begins with the first two anew."""
    inputs = np.zeros((4, 1), np.float32)

    def generator():
        for number in itertools.count():
            yield np.full_like(inputs, number), inputs

    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)]
        )
        model.compile(tf.keras.optimizers.SGD(0.0), "mae", steps_per_execution=together)
    validation = {"validation_data": generator(), "validation_steps": 4}
    every = model.fit(inputs, inputs, epochs=4, verbose=0, **validation)
    drawn = [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7], [0, 1, 8, 9]]
    assert every.history["val_loss"] == [np.mean(each) for each in drawn]


# Keras's, at the end of a generator.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_data_of_python_are_read_once(tf, strategy):
    """Every batch of a generator and of worker threads. The program's arrays stay as they are.

    Batch i has targets of i, of which the model predicts 0; with other shapes than the first one.
    """
    inputs = np.arange(96, dtype=np.float32).reshape(24, 2, 2)
    targets = np.repeat(np.arange(8, dtype=np.float32), 3)[:, None]
    kept = inputs.copy(), targets.copy()

    def batch(number):
        rows = slice(3 * number, 3 * number + 3)
        return inputs[rows, : 1 + number % 2], targets[rows]

    def generator():
        yield from map(batch, range(8))

    class Batches(tf.keras.utils.PyDataset):
        def __len__(self):
            return 8

        def __getitem__(self, number):
            return batch(number)

    def model():
        layers = tf.keras.layers
        with strategy.scope():
            pooled = [layers.Input((None, 2)), layers.GlobalAveragePooling1D()]
            made = tf.keras.Sequential([*pooled, layers.Dense(1, kernel_initializer="zeros")])
            made.compile(tf.keras.optimizers.SGD(0.0), "mse")
        return made

    expected = np.mean(np.arange(8) ** 2)
    for _ in range(2):
        history = model().fit(generator(), steps_per_epoch=4, epochs=2, verbose=0)
        assert history.history["loss"] == pytest.approx([3.5, 31.5])
        assert model().evaluate(generator(), verbose=0) == pytest.approx(expected)
        history = model().fit(Batches(workers=2), epochs=2, shuffle=False, verbose=0)
        assert history.history["loss"] == pytest.approx([expected] * 2)
    np.testing.assert_array_equal(inputs, kept[0])
    np.testing.assert_array_equal(targets, kept[1])


def test_gradients_count_by_rows(tf, strategy, comm, equal_on_all):
    """In steps with the usual number of rows, with others, and on ranks without any."""
    for counts in ([4, 4], [3, 0], [1, 3], [0, 2], [6, 6], [4, 4]):
        rows, gradient = counts[comm.rank], comm.rank + 1.5 if counts[comm.rank] else np.nan

        def sums(strategy, rows=rows, gradient=gradient):
            tensors = [tf.fill([2, 3], gradient), tf.constant([gradient], tf.float64)]
            return strategy.extended.gradient_sums(tensors, tf.constant(rows))

        found = strategy.run(lambda sums=sums: tf.distribute.get_replica_context().merge_call(sums))
        expected = 2 * (counts[0] * 1.5 + counts[1] * 2.5) / sum(counts)
        assert [each.dtype for each in found] == [tf.float32, tf.float64]
        for each in found:
            np.testing.assert_allclose(each, np.full(each.shape, expected), rtol=1e-6)
        equal_on_all(found)
