"""What Keras users do on several ranks, checked against one process with the whole batches.

Runs under mpirun, with the backend of KERAS_BACKEND, and prints for each check its error, or null:
one start serves all checks, since importing the frameworks takes longest.
"""

import copy
import json
import logging
import math
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from itertools import chain
from pathlib import Path

if "--tensorflow" not in sys.argv:
    sys.modules["tensorflow"] = None  # Keras would import it, which takes long

import keras
import numpy as np

import collectives
import strategies
from strategies.keras.orders import OrderedPyDataset

BACKEND = keras.config.backend()
WORLD = collectives.world(deadline=60)
RANK, SIZE = WORLD.rank, WORLD.size
STRATEGY = strategies.MultiWorkerMirroredStrategy()
BATCH, EPOCHS = 12, 4

generator = np.random.default_rng(3)
ROWS = 5 * BATCH + 1  # the last rank's piece of the last batch is empty
X = generator.normal(size=(ROWS, 6)).astype("float32")
Y = np.tanh(X @ generator.normal(size=(6, 1))).astype("float32")
CLASSES = (Y[:, 0] > 0).astype("int32")
WEIGHTS = generator.uniform(0.5, 2, ROWS).astype("float32")

CHECKS, OTHERS = {}, {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def needs_tensorflow(function):
    OTHERS[function.__name__] = function
    return function


def dense(outputs=1, seed=1, **how):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(outputs, **how)]
    )


def normalized(seed=1):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
    )


def compiled(make=dense, optimizer=None, **how):
    """A model on one process, or in the strategy's scope; each rank begins with other weights.

    What makes a metric makes one for each model.
    """

    def model_of(seed):
        model = make(seed=seed)
        named = {"loss": "mse"} | how
        own = [each() if callable(each) else each for each in how.get("metrics", ())]
        model.compile(optimizer() if optimizer else "sgd", **named | {"metrics": own or None})
        return model

    alone = model_of(1)
    with STRATEGY.scope():
        together = model_of(1 + RANK)
    return alone, together


def weights_of(model):
    return np.concatenate([np.ravel(each) for each in model.get_weights()])


def assert_same_everywhere(value):
    every = WORLD.all_gather_object(value)
    assert all(each == every[0] for each in every), str(every)[:2000]


def assert_in_step(alone, together, tolerance=1e-5):
    own = weights_of(together)
    assert_same_everywhere(own.tobytes())
    np.testing.assert_allclose(own, weights_of(alone), rtol=0, atol=tolerance)


def assert_same_history(alone, together):
    assert_same_everywhere(together.history)
    assert together.history.keys() == alone.history.keys()
    for name, values in alone.history.items():
        np.testing.assert_allclose(together.history[name], values, rtol=2e-5, err_msg=name)


def trained(alone, together, *data, **how):
    """Fit both; how: as of `fit`."""
    how = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0} | how
    histories = [model.fit(*data, **how) for model in (alone, together)]
    assert_in_step(alone, together)
    assert_same_history(*histories)


def logged():
    """The warnings of the library from now on."""
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("strategies").addHandler(handler)
    return warnings


def directory():
    """One directory for all ranks."""
    made = tempfile.mkdtemp() if RANK == 0 else None
    return Path(WORLD.broadcast_object(made))


def raised_everywhere(kind, words, function):
    text = None
    try:
        function()
    except kind as error:
        text = str(error)
    texts = WORLD.all_gather_object(text)
    assert all(each is not None and words in each for each in texts), texts


@check
def short_batches_and_validation():
    alone, together = compiled(optimizer=lambda: keras.optimizers.Adam(0.01), metrics=["mae"])
    trained(alone, together, X, Y, validation_split=0.3)
    trained(alone, together, X, Y, validation_data=(X[:7], Y[:7]), validation_batch_size=3)
    assert type(together.optimizer).__name__ == "Adam"


@check
def optimizers_act_after_the_reduction():
    for how in (
        {"clipnorm": 0.05},
        {"global_clipnorm": 0.05, "gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    ):
        pair = compiled(optimizer=lambda how=how: keras.optimizers.SGD(0.1, 0.9, **how))
        trained(*pair, X, Y)
        # With JAX, weights and their averages then share buffers: in one process Keras fails.
        pair[1].fit(X, Y, batch_size=BATCH, verbose=0)


@check
def weights_of_samples_and_classes():
    trained(*compiled(weighted_metrics=["mae"]), X, Y, sample_weight=WEIGHTS)

    def classes(seed):
        return dense(2, seed, activation="softmax")

    how = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    trained(*compiled(classes, **how), X, CLASSES, class_weight={0: 1.0, 1: 3.0})


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


class LateBatches(Batches):
    """Batches that come late on one rank, whose workers have read less ahead than others."""

    def __getitem__(self, index):
        time.sleep(0.02 * (RANK == SIZE - 1))
        return super().__getitem__(index)


@check
def orders_of_batches():
    """A pass gives each batch once, whatever is read ahead and wherever epochs end."""

    class Numbers(keras.utils.PyDataset):
        reads, ends = 0, []

        def __len__(self):
            return 6

        def __getitem__(self, index):
            self.reads += 1
            time.sleep(0.002 * (RANK + 1))  # each rank has read another number ahead
            self.reads -= 1
            if index == 4 and len(self.ends) > 2:
                raise OSError("no such batch")
            return index

        def on_epoch_end(self):
            self.ends.append(self.reads)

    for options in ({}, {"workers": 3, "max_queue_size": 2}, {"workers": 2, "max_queue_size": 0}):
        dataset = Numbers(**options)
        dataset.ends = []
        ordered = OrderedPyDataset(dataset, seed=7)
        passes = []
        for _ in range(2):
            first = [ordered[index] for index in range(3)]
            ordered.on_epoch_end()
            ordered.on_epoch_begin()
            passes.append(first + [ordered[index] for index in range(3, 6)])
        assert [sorted(each) for each in passes] == [list(range(6))] * 2
        assert passes[0] != passes[1]
        assert_same_everywhere(str(passes).encode())
        ordered[0]
        ordered.on_epoch_end()
        assert dataset.ends == [0] * 3  # nothing was read meanwhile
        found = [raises(OSError, partial(ordered.__getitem__, index)) for index in range(6)]
        assert found.count(True) == 1
        whole = OrderedPyDataset(Numbers(**options), None)
        assert [whole[index] for index in range(6)] == list(range(6))


def raises(kind, call):
    try:
        call()
    except kind:
        return True
    return False


def batches():
    while True:
        yield from (Batches()[index] for index in range(6))


@check
def batches_of_datasets_and_generators():
    trained(*compiled(), Batches(), batch_size=None)
    how = {"batch_size": None, "steps_per_epoch": 6, "epochs": 2}
    alone, together = compiled()
    histories = [model.fit(batches(), verbose=0, **how) for model in (alone, together)]
    assert_in_step(alone, together)
    assert_same_history(*histories)
    alone, together = compiled()
    how = {"steps_per_epoch": 3, "epochs": 4, "shuffle": False, "verbose": 0}
    histories = [alone.fit(Batches(), **how)]
    histories.append(together.fit(LateBatches(workers=2, max_queue_size=2), **how))
    assert_in_step(alone, together)
    assert_same_history(*histories)
    if BACKEND == "torch":
        import torch

        data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        loader = torch.utils.data.DataLoader(data, BATCH)
        trained(*compiled(), loader, batch_size=None, validation_data=loader)
        _, together = compiled()
        keras.utils.set_random_seed(RANK)
        shuffled = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
        together.fit(shuffled, epochs=2, verbose=0)
        assert_same_everywhere(weights_of(together).tobytes())


@check
def shuffled_pieces_are_every_row_once():
    from strategies.keras.data import share_data
    from strategies.keras.orders import common_seed
    from strategies.keras.training import Training

    np.random.seed(RANK)
    training = Training(STRATEGY)
    orders = []
    for shuffle in (True, "batch"):
        how = {"batch_size": BATCH, "seed": common_seed(WORLD)}
        pieces = share_data(training, np.arange(ROWS)[:, None], shuffle=shuffle, **how)
        for _ in range(2):
            rows = [each.ravel().tolist() for each in pieces.get_numpy_iterator()]
            parts = zip(*WORLD.all_gather_object(rows), strict=True)
            whole = [list(chain(*part)) for part in parts]
            assert [len(each) for each in whole] == [BATCH] * 5 + [1]
            orders.append(list(chain(*whole)))
            assert sorted(orders[-1]) == list(range(ROWS))
    assert sorted(orders[2][:BATCH]) == list(range(BATCH))
    assert len({tuple(each) for each in orders}) == 4
    _, together = compiled()
    together.fit(X, Y, epochs=2, verbose=0)
    together.fit(Batches(), epochs=2, verbose=0)
    assert_same_everywhere(weights_of(together).tobytes())
    if BACKEND == "torch":
        import torch

        data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        torch.manual_seed(RANK)
        shuffled = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
        for _ in range(2):
            found = together.evaluate(shuffled, verbose=0)
            np.testing.assert_allclose(found, together.evaluate(X, Y, verbose=0), rtol=1e-5)


class Kept(keras.metrics.MeanAbsoluteError):
    """Over all epochs and evaluations."""

    def reset_state(self):
        pass


@check
def evaluation_and_prediction():
    alone, together = compiled(metrics=["mae", keras.metrics.R2Score, Kept])
    alone.fit(X, Y, epochs=1, verbose=0, shuffle=False, batch_size=BATCH)
    together.fit(X, Y, epochs=1, verbose=0, shuffle=False, batch_size=BATCH)
    for data in ((X, Y), (Batches(),)):
        how = {"batch_size": BATCH} if len(data) == 2 else {}
        expected = alone.evaluate(*data, verbose=0, **how)
        found = together.evaluate(*data, verbose=0, **how)
        assert_same_everywhere(found)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        found = together.predict(data[0], verbose=0, **how)
        np.testing.assert_allclose(found, alone.predict(data[0], verbose=0, **how), atol=1e-5)
        assert_same_everywhere(found.tobytes())
    found = together.predict(batches(), steps=3, verbose=0)
    np.testing.assert_allclose(found, alone.predict(X[: 3 * BATCH], verbose=0), atol=1e-5)
    one = together.predict(X[:1], verbose=0)
    assert one.shape == (1, 1)
    with STRATEGY.scope():
        unbuilt = keras.Sequential([keras.layers.Dense(2)])
        unbuilt.compile("sgd", "mse")
    assert_same_everywhere(unbuilt.predict(X, verbose=0).tobytes())
    with STRATEGY.scope():
        unbuilt = keras.Sequential([keras.layers.Dense(2)])
        unbuilt.compile("sgd", "mse")
    found = unbuilt.predict(Batches(workers=2), verbose=0)
    np.testing.assert_allclose(found, unbuilt.predict(X, verbose=0), atol=1e-5)
    inputs = keras.Input((6,))
    with STRATEGY.scope():
        pairs = keras.Model(inputs, keras.ops.reshape(inputs, (-1, 12)))
        pairs.compile("sgd", "mse")
    words = "must have as many"
    raised_everywhere(
        ValueError, words, lambda: pairs.predict(X[: 4 * SIZE], batch_size=2 * SIZE, verbose=0)
    )


@check
def loops_begin_with_the_chiefs_state():
    alone, together = compiled()
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    for step, loop in enumerate(
        [
            lambda model: model.evaluate(X, Y, verbose=0),
            lambda model: model.predict(X, verbose=0),
            lambda model: model.train_on_batch(X, Y),
            lambda model: model.fit(X, Y, **how).history["loss"],
        ]
    ):
        for model in (alone, together):
            model.fit(X, Y, **how)
        later = [each + step + 1 for each in together.get_weights()]
        alone.set_weights(later)
        if RANK == 0:
            together.set_weights(later)
        np.testing.assert_allclose(loop(together), loop(alone), rtol=1e-5)
        assert_in_step(alone, together, 1e-4)
    if RANK == SIZE - 1:
        together.compile("sgd", "mse")
    words = "the model is compiled 2 times"
    raised_everywhere(ValueError, words, lambda: together.predict(X, verbose=0))
    _, together = compiled()
    if RANK == SIZE - 1:
        together.optimizer.learning_rate = 0.5
    call = partial(together.train_on_batch, X, Y)
    raised_everywhere(ValueError, "learning_rate=['0.5']", call)
    _, together = compiled()
    together.train_on_batch(X, Y)
    together.layers[0].trainable = RANK < SIZE - 1
    raised_everywhere(ValueError, "trained weights=2", partial(together.train_on_batch, X, Y))
    with STRATEGY.scope():
        together = dense()
        together.compile("sgd", "mse", steps_per_execution=2 if RANK == 1 else 1)
    words = "have compiled the model differently"
    raised_everywhere(ValueError, words, lambda: together.fit(X, Y, verbose=0))


@check
def single_batches():
    alone, together = compiled(metrics=["mae"])
    for rows in (slice(0, 12), slice(12, 19), slice(19, 20)):
        expected = alone.train_on_batch(X[rows], Y[rows])
        found = together.train_on_batch(X[rows], Y[rows])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert_in_step(alone, together)
    expected = alone.test_on_batch(X, Y, return_dict=True)
    found = together.test_on_batch(X, Y, return_dict=True)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
    warnings, (_, together) = logged(), compiled()
    for _ in range(2):
        together.train_on_batch(X + RANK, Y)
    assert len(warnings) == int(RANK == 0), warnings


@check
def random_numbers_differ_by_rank():
    """Those of a step of training: the sums of what dropout leaves of ones."""

    class Sums(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.sums = self.add_weight(shape=(64,), initializer="zeros", trainable=False)
            self.dropout = keras.layers.Dropout(0.5, seed=7)

        def call(self, inputs, training=False):
            left = self.dropout(keras.ops.ones((1, 64)), training=training)
            self.sums.assign(self.sums + left[0])
            return inputs

    keras.utils.set_random_seed(5)
    with STRATEGY.scope():
        layer = Sums()
        model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    seen = []

    class Records(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if BACKEND == "torch":  # JAX's state is in the layer after the epoch
                seen.append(keras.ops.convert_to_numpy(layer.sums).tolist())

    inputs, wanted = X[: 5 * BATCH], Y[: 5 * BATCH]  # in each step every rank has rows
    model.fit(inputs, wanted, batch_size=BATCH, verbose=0, callbacks=[Records()])
    if seen:
        assert len(set(map(tuple, WORLD.all_gather_object(seen[-1])))) == SIZE
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    drawn = WORLD.all_gather_object(keras.ops.convert_to_numpy(layer.sums).tolist())
    assert len(set(map(tuple, drawn))) == SIZE, drawn
    assert keras.random.SeedGenerator.next.__module__ == "keras.src.random.seed_generator"


@check
def moving_statistics_are_averaged():
    _, together = compiled(normalized)
    path = directory() / "model.keras"
    seen = []

    class Records(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([each.numpy().tobytes() for each in self.model.variables[4:8]])

    saves = keras.callbacks.ModelCheckpoint(path)
    together.fit(X, Y, epochs=2, batch_size=BATCH, verbose=0, callbacks=[Records(), saves])
    assert_same_everywhere(seen)
    assert_same_everywhere(weights_of(together).tobytes())
    WORLD.barrier()
    loaded = keras.models.load_model(path)
    assert type(loaded) is keras.Sequential
    assert "fit" not in vars(loaded)
    np.testing.assert_array_equal(weights_of(loaded), weights_of(together))
    loaded.fit(X, Y, verbose=0)
    with STRATEGY.scope():
        again = keras.models.load_model(path)
    again.fit(X, Y, batch_size=BATCH, verbose=0)
    assert_same_everywhere(weights_of(again).tobytes())
    WORLD.barrier()


class Calls(keras.callbacks.Callback):
    """Calls a method of the model with the data: at the beginning of epochs, or within them."""

    def __init__(self, name, *data, begins=False, **how):
        super().__init__()
        self.call = lambda: getattr(self.model, name)(*data, verbose=0, **how)
        self.begins = begins

    def on_epoch_begin(self, epoch, logs=None):
        if self.begins:
            self.call()

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and not self.begins:
            self.call()


@check
def calls_within_an_epoch():
    """Statistics are averaged again at its end, metrics go on, and its data may end early."""
    _, together = compiled(normalized)
    _, counting = compiled(counters)
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    for model in (together, counting):
        model.fit(X, Y, callbacks=[Calls("predict", X[:5])], **how)
        assert_same_everywhere(weights_of(model).tobytes())
    assert {float(each) for each in counting.layers[0].counts if "sum" in each.name} == {1 + ROWS}
    for calls in (
        Calls("evaluate", X, Y, begins=True),
        Calls("evaluate", X, Y),
        Calls("fit", X, Y, shuffle=False),
    ):
        alone, together = compiled(metrics=["mae", "mse"])
        trained(alone, together, X, Y, callbacks=[calls])

    class Logs(keras.Sequential):
        def train_step(self, *given):
            logs, *state = super().train_step(*given), None
            if BACKEND == "jax":
                logs, *state = logs
            logs = {**logs, "own": keras.ops.mean(given[-1][0])}
            return (logs, *state) if BACKEND == "jax" else logs

    def logging(seed):
        keras.utils.set_random_seed(seed)
        return Logs([keras.Input((6,)), keras.layers.Dense(1)])

    trained(*compiled(logging), X, Y, callbacks=[Calls("predict", X[:1])])
    if BACKEND == "torch":  # JAX has given the weights away while data are read

        def predicting():
            for index in range(5):
                together.predict(X[:1], verbose=0)
                yield Batches()[index]

        _, together = compiled(normalized)
        together.fit(predicting(), verbose=0)
        assert_same_everywhere(weights_of(together).tobytes())

    def some():
        yield from (Batches()[index] for index in range(5 - (RANK == SIZE - 1)))

    _, together = compiled()
    raised_everywhere(
        ValueError,
        f"have a further batch, ranks [{SIZE - 1}] have none",
        lambda: together.fit(some(), verbose=0, callbacks=[Calls("evaluate", X, Y)]),
    )


@check
def random_numbers_of_data_and_callbacks():
    """They are the same on all ranks, and as in one process: only steps draw their own."""
    orders = []

    def shuffled():
        seed = keras.random.SeedGenerator(7)
        for _ in range(EPOCHS):
            order = keras.random.shuffle(np.arange(4 * BATCH), seed=seed)
            orders.append(keras.ops.convert_to_numpy(order).tolist())
            for rows in np.reshape(orders[-1], (4, BATCH)):
                yield X[rows % ROWS], Y[rows % ROWS]

    class Noise(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.seed = keras.random.SeedGenerator(epoch)

        def on_epoch_end(self, epoch, logs=None):
            kernel, *others = self.model.get_weights()
            noise = keras.random.normal(kernel.shape, stddev=0.01, seed=self.seed)
            self.model.set_weights([kernel + keras.ops.convert_to_numpy(noise), *others])

    for model in compiled():
        noise = [Noise()]
        model.fit(shuffled(), steps_per_epoch=4, epochs=EPOCHS, verbose=0, callbacks=noise)
    assert orders[:EPOCHS] == orders[EPOCHS:]


@check
def statistics_that_follow_from_weights():
    """Those of SpectralNormalization change on a rank without rows, too."""

    def spectral(seed):
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        inner = layers.SpectralNormalization(layers.Dense(4))
        return keras.Sequential([keras.Input((6,)), inner, layers.Dense(1)])

    class Uneven(keras.utils.PyDataset):
        """The second batch has no row for the last rank."""

        def __len__(self):
            return 3

        def __getitem__(self, index):
            rows = slice(index, index + (SIZE - 1 if index == 1 else BATCH))
            return X[rows], Y[rows]

    alone, together = compiled(spectral)
    trained(alone, together, Uneven(), batch_size=None)


@check
def an_optimizer_that_is_built_in_the_scope():
    """One of Nadam's variables counts as trainable, as a variable of no model would."""
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dense(Y.shape[1])])
        model.compile(keras.optimizers.Nadam(), "mse")
        model.optimizer.build(model.trainable_variables)
    model.fit(X, Y, verbose=0)
    assert_same_everywhere(weights_of(model).tobytes())


@check
def callbacks_on_the_chief_and_everywhere():
    path = directory()
    _, together = compiled()
    calls = []

    class Counts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            calls.append(logs)

    callbacks = keras.callbacks
    history = together.fit(
        X,
        Y,
        epochs=12,
        verbose=0,
        validation_data=(X[:9], Y[:9] + 5),
        callbacks=[
            Counts(),
            callbacks.CSVLogger(path / f"{RANK}.csv"),
            callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=0.05),
            callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch + RANK)),
            callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, min_delta=9),
        ],
    )
    assert_same_everywhere([calls, history.history])
    assert_same_everywhere(weights_of(together).tobytes())
    WORLD.barrier()
    assert [each.name for each in path.glob("*.csv")] == ["0.csv"]


@check
def a_stop_on_one_rank_within_an_epoch():
    _, together = compiled()
    batches_seen = []

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches_seen.append(batch)
            if RANK == SIZE - 1 and batch == 2:
                self.model.stop_training = True

    together.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[Stops()])
    assert batches_seen == [0, 1, 2], batches_seen
    assert_same_everywhere(weights_of(together).tobytes())

    class Limited(keras.callbacks.CSVLogger):  # on the chief alone
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    file = Path(directory()) / "log.csv"
    history = together.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[Limited(file)])
    assert history.epoch == [0], history.epoch
    assert_same_everywhere(weights_of(together).tobytes())


@check
def a_backup_is_restored_on_all_ranks():
    path = directory()
    alone, together = compiled(optimizer=lambda: keras.optimizers.Adam(0.01))
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}

    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def backup():
        return keras.callbacks.BackupAndRestore(path)

    try:
        together.fit(X, Y, epochs=4, callbacks=[backup(), Breaks()], **how)
        raise AssertionError
    except KeyboardInterrupt:
        pass
    _, again = compiled(optimizer=lambda: keras.optimizers.Adam(0.01))
    history = again.fit(X, Y, epochs=4, callbacks=[backup()], **how)
    assert history.epoch == [2, 3], history.epoch
    alone.fit(X, Y, epochs=4, **how)
    assert_in_step(alone, again)


@check
def errors_of_the_chiefs_savers():
    """Raised on every rank, from the beginning and from the end of an epoch."""
    path = directory()
    _, together = compiled()
    how = {"batch_size": BATCH, "verbose": 0}
    if RANK == 0:
        (path / "latest.weights.h5").write_bytes(b"no backup")
    WORLD.barrier()
    backup = keras.callbacks.BackupAndRestore(path)
    raised_everywhere(
        OSError, "file signature", lambda: together.fit(X, Y, callbacks=[backup, backup], **how)
    )
    assert "on_train_begin" not in vars(backup)

    class Full(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise OSError("no room")

    full = Full(path / "a.keras")
    full.on_train_begin = lambda logs=None: None
    raised_everywhere(
        OSError, "no room", lambda: together.fit(X, Y, epochs=3, callbacks=[full], **how)
    )
    assert "on_train_begin" in vars(full)
    assert "on_epoch_end" not in vars(full)
    absent = keras.callbacks.CSVLogger(path / "absent" / "a.csv")
    raised_everywhere(OSError, "absent", lambda: together.fit(X, Y, callbacks=[absent], **how))
    how["validation_data"] = X[:4], Y[:4]
    for method in ("on_train_batch_end", "on_train_end", "on_epoch_begin", "on_test_end"):
        log = keras.callbacks.CSVLogger(path / f"{RANK}.csv")
        setattr(log, method, _full)
        fit = partial(together.fit, X, Y, callbacks=[log], **how)
        raised_everywhere(OSError, "no room", fit)
    together.fit(X, Y, epochs=1, **how)


def _full(*args, **named):
    raise OSError("no room")


class Custom(keras.Model):
    """A step of its own, with other logs than Keras's."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(4), keras.layers.Dense(1)
        # Of the second one no step returns the result.
        self.tracked = [keras.metrics.Mean(name) for name in ("tracked", "left_out")]

    def call(self, inputs):
        return self.last(self.hidden(inputs))

    def train_step(self, *arguments):
        if BACKEND == "torch":
            x, y = arguments[0]
            self.zero_grad()
            errors = keras.ops.square(self(x) - y)
            loss = keras.ops.mean(errors)
            loss.backward()
            variables = self.trainable_variables
            self.optimizer.apply([each.value.grad for each in variables], variables)
            for metric in self.tracked:
                metric.update_state(errors.detach())
            return {"loss": loss.detach(), "tracked": self.tracked[0].result()}
        import jax

        (trainable, others, optimizer, metrics), (x, y) = arguments

        def loss_of(values):
            predicted, _ = self.stateless_call(values, others, x)
            return keras.ops.mean(keras.ops.square(predicted - y))

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"own": loss}, (trainable, others, optimizer, metrics)


@check
def a_custom_step():
    def make(seed):
        keras.utils.set_random_seed(seed)
        return Custom()

    alone, together = compiled(make)
    trained(alone, together, X, Y)


class Guide(keras.Sequential):
    """The step of Keras's guide on `fit`, which returns the metrics of `compile` as one log."""

    if BACKEND == "torch":

        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            self.zero_grad()
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
            loss.backward()
            variables = self.trainable_variables
            self.optimizer.apply([each.value.grad for each in variables], variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss, sample_weight=len(x))
                else:
                    metric.update_state(y, predicted)
            return {each.name: each.result() for each in self.metrics}


@check
def metrics_of_the_guides_step():
    def make(seed):
        keras.utils.set_random_seed(seed)
        first = keras.layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2")
        return Guide([keras.Input((6,)), first, keras.layers.Dense(1, "sigmoid")])

    metrics = [
        partial(keras.metrics.AUC, num_thresholds=11, name="auc"),
        partial(keras.metrics.F1Score, threshold=0.5, name="f1"),
    ]
    models = compiled(make, loss="binary_crossentropy", metrics=metrics)
    classes = CLASSES[:, None].astype("float32")
    # Pieces of one row: most ranks begin with none, and build the model.
    trained(*models, X[:1], classes[:1])
    trained(*models, X, classes)
    alone, together = (
        each.train_on_batch(X[:BATCH], classes[:BATCH], return_dict=True) for each in models
    )
    assert together.keys() == alone.keys() == {"loss", "auc", "f1"}
    for name, expected in alone.items():
        assert np.shape(together[name]) == np.shape(expected)
        np.testing.assert_allclose(together[name], expected, rtol=2e-5, err_msg=name)


@check
def files_that_all_ranks_write():
    _, together = compiled()
    together.fit(X, Y, batch_size=BATCH, verbose=0)
    folder = directory()
    options = {"m.keras": {"include_optimizer": False}, "m.weights.h5": {"overwrite": True}}
    for number in range(10):
        for save, name in ((together.save, "m.keras"), (together.save_weights, "m.weights.h5")):
            save(folder / name, **options[name] if number % 2 else {})
            WORLD.barrier()
            if name == "m.keras":
                read = keras.models.load_model(folder / name)
                np.testing.assert_array_equal(weights_of(read), weights_of(together))
            else:
                together.load_weights(folder / name)
            WORLD.barrier()
    assert sorted(each.name for each in folder.iterdir()) == ["m.keras", "m.weights.h5"]


@check
def weights_that_no_reduction_keeps_equal():
    class Descends(Custom):
        """Changes its weights without an optimizer of Keras."""

        def train_step(self, *arguments):
            if BACKEND == "torch":
                import torch

                x, y = arguments[0]
                self.zero_grad()
                loss = keras.ops.mean(keras.ops.square(self(x) - y))
                loss.backward()
                torch.optim.SGD([each.value for each in self.trainable_variables], 0.05).step()
                return {"own": loss.detach()}
            (trainable, *others), (x, _) = arguments
            return {"own": x[0, 0]}, ([each + x[0, 0] for each in trainable], *others)

    with STRATEGY.scope():
        together = Descends()
        together.compile()
    steps = []
    counts = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(1))
    raised_everywhere(
        ValueError,
        "weights differ after the first training step: 'descends",
        lambda: together.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[counts]),
    )
    assert not steps
    # The variables have values again, and differ as the error says.
    assert np.isfinite(together.predict(X[:4], verbose=0)).all()

    class Assigns(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                bias = self.model.layers[1].bias
                bias.assign(bias + RANK)

    _, together = compiled()
    raised_everywhere(
        ValueError,
        "weights differ at the end of epoch 1: 'sequential",
        lambda: together.fit(X, Y, epochs=3, verbose=0, callbacks=[Assigns()]),
    )

    class AssignsLast(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            bias = self.model.layers[1].bias
            bias.assign(bias + RANK)

    _, together = compiled()
    raised_everywhere(
        ValueError,
        "weights differ at the end of training: 'sequential",
        lambda: together.fit(X, Y, verbose=0, callbacks=[AssignsLast()]),
    )


@check
def arrays_that_each_rank_has_divided():
    _, together = compiled()
    own = slice(RANK, SIZE * (ROWS // SIZE), SIZE)
    words = "must be given the same whole arrays"
    raised_everywhere(ValueError, words, lambda: together.fit(X[own], Y[own], verbose=0))
    raised_everywhere(ValueError, words, lambda: together.predict(X[own], verbose=0))
    validation = (X[own], Y[own])
    raised_everywhere(
        ValueError, words, lambda: together.fit(X, Y, validation_data=validation, verbose=0)
    )
    later = X.copy()
    later[-1] += RANK
    raised_everywhere(ValueError, words, lambda: together.evaluate(later, Y, verbose=0))


class Counters(keras.layers.Layer):
    """Variables that no gradient changes, of every kind of aggregation."""

    def build(self, shape):
        kinds = [(kind, dtype) for kind in KINDS for dtype in ("int32", "float32")]
        self.counts = [
            self.add_weight(
                (), "ones", dtype, trainable=False, aggregation=kind, name=f"{kind}_{dtype}"
            )
            for kind, dtype in kinds
        ]

    def call(self, x, training=False):
        if training:
            for each in self.counts:
                each.assign(each + keras.ops.cast(keras.ops.shape(x)[0], each.dtype))
        return x


KINDS = ("none", "sum", "mean", "only_first_replica")


def counters(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), Counters(), keras.layers.Dense(1)])


@check
def variables_of_layers_by_their_aggregation():
    alone, together = compiled(counters)
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    for _ in range(2):
        for model in (alone, together):
            model.fit(X, Y, epochs=2, **how)
            model.train_on_batch(X[:BATCH], Y[:BATCH])
    for model in (alone, together):
        model.test_on_batch(X[:BATCH], Y[:BATCH])
    found = {each.name: float(each) for each in together.layers[0].counts}
    assert_same_everywhere(found)
    expected = {each.name: float(each) for each in alone.layers[0].counts}
    assert found["sum_int32"] == expected["sum_int32"] == 1 + 2 * (2 * ROWS + BATCH)
    assert found["sum_float32"] == expected["sum_float32"]
    # The chief has the longest piece of each batch, the only one of the last.
    chiefs = 1 + 2 * (2 * (5 * -(-BATCH // SIZE) + 1) + -(-BATCH // SIZE))
    assert found["none_int32"] == found["only_first_replica_float32"] == chiefs, found
    mean = (expected["sum_int32"] - 1) / SIZE + 1
    assert abs(found["mean_float32"] - mean) < 1e-3, found
    assert abs(found["mean_int32"] - mean) <= 5, found  # rounded at each epoch's end


@check
def data_that_fails_on_one_rank():
    def fails():
        if RANK == SIZE - 1:
            raise OSError("no such data")
        yield from batches()

    _, together = compiled()
    how = {"validation_data": fails(), "validation_steps": 2, "verbose": 0}
    raised_everywhere(OSError, "no such data", lambda: together.fit(X, Y, **how))
    together.evaluate(X, Y, verbose=0)


@check
def data_that_ends_early_on_one_rank():
    def some():
        yield from (Batches()[index] for index in range(5 - RANK))

    averaged = {"make": normalized}
    for steps in ({}, {"metrics": ["mae"], "run_eagerly": True}, averaged):
        _, together = compiled(**steps)
        raised_everywhere(
            ValueError,
            f"have a further batch, ranks [{SIZE - 1}] have none",
            lambda together=together: together.fit(some(), verbose=0),
        )
        if BACKEND == "jax" and "run_eagerly" not in steps:
            for name in ("predict", "train_on_batch", "evaluate", "fit", "test_on_batch"):
                call, given = getattr(together, name), (X, Y)[: 1 + (name != "predict")]
                text = "the model's variables have no values"
                raised_everywhere(ValueError, text, partial(call, *given))
    _, together = compiled()
    together.fit(X, Y, verbose=0)
    for name, call in {
        "evaluate": lambda: together.evaluate(some(), verbose=0),
        "predict": lambda: together.predict(some(), verbose=0),
        "fit's validation": lambda: together.fit(X, Y, validation_data=some(), verbose=0),
    }.items():
        text = f"{name}: the ranks' batches have different numbers of rows"
        raised_everywhere(ValueError, text, call)
    trained(*compiled(), X, Y, validation_data=Batches())


@check
def losses_that_are_sums():
    def of_all_rows(targets, predicted):
        return keras.ops.sum(keras.ops.square(predicted - targets))

    _, together = compiled(loss=of_all_rows)
    raised_everywhere(
        ValueError, "'of_all_rows' is a sum", lambda: together.fit(X, Y, batch_size=BATCH)
    )
    together.compile("sgd", "mse")
    together.fit(X, Y, batch_size=BATCH, verbose=0)

    def of_each_row(targets, predicted):
        return keras.ops.mean(keras.ops.square(predicted - targets))

    trained(*compiled(loss=of_each_row), X[:48], Y[:48], epochs=1)


@check
def compiling_again_and_elsewhere():
    alone, together = compiled()
    for model in (alone, together):
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.05), "mae")
    trained(alone, together, X, Y)
    outside = dense(seed=RANK)
    with STRATEGY.scope():
        outside.compile("sgd", "mse")
    alone = dense(seed=0)
    alone.compile("sgd", "mse")
    trained(alone, outside, X, Y)
    made = []

    def compiled_outside():
        with STRATEGY.scope():
            made.append(dense())
        made[0].compile("sgd", "mse")

    raised_everywhere(TypeError, "model.compile(optimizer, loss), then model.fit", compiled_outside)

    def apart():
        with strategies.LocalSGDStrategy(sync_every=2).scope():
            made.append(dense())
            made[1].compile("sgd", "mse")

    raised_everywhere(TypeError, "a strategy whose replicas take each step together", apart)
    other = strategies.MultiWorkerMirroredStrategy()
    with other.scope():
        together.compile("sgd", "mse")
    assert together.fit.__self__._training.owner is other
    together.fit(X, Y, verbose=0)


@check
def lists_of_communication_options():
    options = strategies.CommunicationOptions(
        implementation=strategies.CommunicationImplementation.RING
    )
    strategy = strategies.MultiWorkerMirroredStrategy(communication_options=options)
    alone = dense()
    alone.compile("sgd", "mse")
    with strategy.scope():
        together = dense(seed=1 + RANK)
        together.compile("sgd", "mse")
    trained(alone, together, X, Y, epochs=2)


@check
def compressed_gradients():
    """topk(1) leaves nothing out of a step; of topk(0.3) every rank applies the same."""
    from mpi4py import MPI

    nodes = collectives.Communicator(MPI.COMM_WORLD, node_of=[0, *[1] * (SIZE - 1)], deadline=60)
    for compression in ("topk(1)", "topk(0.3)"):
        options = strategies.CommunicationOptions(compression=compression)
        strategy = strategies.MultiWorkerMirroredStrategy(None, options, communicator=nodes)
        alone = dense()
        alone.compile("sgd", "mse")
        with strategy.scope():
            together = dense(seed=1 + RANK)
            together.compile("sgd", "mse")
        if compression == "topk(1)":
            trained(alone, together, X, Y, epochs=2)
        else:
            losses = together.fit(X, Y, batch_size=BATCH, epochs=5, verbose=0).history["loss"]
            assert losses[-1] < losses[0]
            assert_same_everywhere(weights_of(together).tobytes())
        share = float(compression[5:-1])
        kept = sum(math.ceil(share * each.size) for each in together.get_weights())
        sent = strategy.compressed.bytes_between_nodes
        assert sent == (8 * kept if nodes.local_rank == 0 else 0), sent
        strategy.compressed.close()
    options = strategies.CommunicationOptions(compression="topk(0.3)")
    half_precision(strategies.MultiWorkerMirroredStrategy(None, options, communicator=nodes))
    reduces_to_one = strategies.ReductionToOneDevice()
    half_precision(strategies.MirroredStrategy(None, reduces_to_one, communicator=WORLD))
    nodes.close()


def half_precision(strategy):
    """Gradients of bfloat16, which NumPy has only from ml_dtypes, are those of every rank."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(2, dtype="bfloat16"), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    before = weights_of(model)
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert not np.array_equal(before, weights_of(model))
    assert_same_everywhere(weights_of(model).tobytes())


@check
def errors_are_those_of_every_rank():
    _, together = compiled()
    rows = ROWS - RANK
    raised_everywhere(
        ValueError, "the ranks' arguments differ", lambda: together.fit(X[:rows], Y[:rows])
    )
    with STRATEGY.scope():
        differs = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1 + RANK)])
        differs.compile("sgd", "mse")
        frozen = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        frozen.layers[0].trainable = RANK > 0
        frozen.compile("sgd", "mse")
    for each in (differs, frozen):
        raised_everywhere(
            ValueError, "the ranks' models differ", partial(each.fit, X, Y, verbose=0)
        )
    # Keras takes inputs, outputs and losses by their names, in any order.
    names = ("a", "b") if RANK else ("b", "a")
    with STRATEGY.scope():
        keras.utils.set_random_seed(1)
        inputs = {name: keras.Input((6,), name=name) for name in "ab"}
        outputs = {name: keras.layers.Dense(1)(inputs[name]) for name in "ab"}
        named = keras.Model(inputs, outputs)
        named.compile("sgd", dict.fromkeys("ab", "mse"))
    data = {name: X + index for index, name in enumerate("ab")}
    targets = {name: Y + 9 * index for index, name in enumerate("ab")}
    data, targets = ({name: each[name] for name in names} for each in (data, targets))
    history = named.fit(data, targets, verbose=0).history
    assert history["b_loss"][0] > 9 * history["a_loss"][0]
    assert_same_everywhere((weights_of(named).tobytes(), history))
    _, unbuilt = compiled()
    apply = partial(unbuilt.optimizer.apply, [np.ones(2)])
    raised_everywhere(ValueError, "must already be built", apply)
    # NumPy's numbers, whose shapes and dtypes are equal.
    epochs = np.int64(1 + RANK)
    fit = partial(together.fit, X, Y, epochs=epochs)
    raised_everywhere(ValueError, "the ranks' arguments differ", fit)
    for options in (
        {"loss": "mae" if RANK else "mse"},
        {"loss": keras.losses.Huber(0.5 + RANK)},
        {"metrics": [partial(keras.metrics.BinaryAccuracy, threshold=0.5 + 0.1 * RANK)]},
        {"optimizer": partial(keras.optimizers.SGD, 0.05, clipnorm=1.0 + RANK)},
        {"loss_weights": [1.0 + RANK]},
    ):
        _, odd = compiled(**options)
        text = "the ranks have compiled the model differently"
        raised_everywhere(ValueError, text, partial(odd.fit, X, Y, verbose=0))
    for name, options in {
        "evaluate": {"verbose": 0},
        "train_on_batch": {},
        "test_on_batch": {},
    }.items():
        _, odd = compiled(loss="mae" if RANK else "mse")
        call = partial(getattr(odd, name), X, Y, **options)
        raised_everywhere(ValueError, f"{name}: {text}", call)
        odd.compile("sgd", "mae")
        call()

    class Odd(keras.losses.MeanSquaredError):
        def get_config(self):
            raise KeyError("a config")

    for kind in (Odd(), keras.losses.MeanSquaredError, partial(keras.losses.mean_squared_error)):
        _, own = compiled(loss=kind)
        own.fit(X, Y, verbose=0)
    # What is each rank's own: names, rates, and a function's code.
    options = {"loss": eval("lambda y, p: ((y - p) ** 2)"), "run_eagerly": False}
    optimizer = partial(keras.optimizers.SGD, 0.05 + RANK, name=f"of_{RANK}")
    _, own = compiled(optimizer=optimizer, metrics=[keras.metrics.MeanSquaredError], **options)
    own.fit(X, Y, verbose=0)
    raised_everywhere(
        ValueError,
        "reduction='sum'",
        lambda: compiled(loss=keras.losses.MeanSquaredError(reduction="sum")),
    )
    for data, rows in (((X[:8], Y[:8], np.ones(4)), "equally many rows"), ((X[:0],), "no rows")):
        kind = together.train_on_batch if len(data) == 3 else partial(together.predict, verbose=0)
        raised_everywhere(ValueError, rows, partial(kind, *data))
    data = STRATEGY.experimental_distribute_dataset([(X, Y)])
    raised_everywhere(TypeError, "x is a DistributedDataset", lambda: together.fit(data))
    together.fit(X, Y, verbose=0)


@check
def keras_is_as_it_was_outside():
    kinds = {kind for model in (keras.Model, keras.optimizers.SGD) for kind in model.__mro__}
    before = {kind: dict(vars(kind)) for kind in kinds}
    _, together = compiled()
    together.fit(X, Y, verbose=0)
    assert {kind: dict(vars(kind)) for kind in kinds} == before
    for copied in (keras.models.clone_model(together), copy.deepcopy(together)):
        assert "fit" not in vars(copied)
        assert "apply" not in vars(getattr(copied, "optimizer", None) or copied)


@check
def a_loss_scale_that_one_rank_overflows():
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=4.0)

    alone, together = compiled(optimizer=optimizer)
    trained(alone, together, X, Y)
    broken = X.copy()
    broken[BATCH - 1] = np.inf  # of the last rank's piece
    before = weights_of(together)
    together.fit(broken[:BATCH], Y[:BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_array_equal(weights_of(together), before)
    assert_same_everywhere(float(together.optimizer.dynamic_scale.numpy()))


@needs_tensorflow
def datasets_of_tensorflow():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    trained(*compiled(), data, batch_size=None, validation_data=data.take(2))
    trained(*compiled(), data.repeat(), batch_size=None, steps_per_epoch=5)
    _, together = compiled()
    warnings = logged()
    shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(64, seed=RANK).batch(BATCH)
    together.fit(shuffled, epochs=2, verbose=0)
    assert_same_everywhere(weights_of(together).tobytes())
    assert len(warnings) == int(RANK == 0)
    assert all("first global" in each for each in warnings)


@check
def convolutions_of_mixed_precision():
    def make(seed):
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu", dtype="mixed_bfloat16"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(3, dtype="float32"),
            ]
        )

    images = np.random.default_rng(1).normal(size=(25, 8, 8, 1)).astype("float32")
    alone, together = compiled(make, loss=keras.losses.MeanSquaredError())
    for model in (alone, together):
        model.fit(images, images[:, 0, :3, 0], batch_size=8, shuffle=False, verbose=0)
    assert_in_step(alone, together, 1e-3)


@check
def values_in_the_place_of_gradients():
    """Those of float8's statistics are maxima over the batch; those of gradients over its parts."""

    def make(seed):
        model = dense(seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for each layer without weights
            model.quantize("float8")
        return model

    alone, together = compiled(make)
    for model in (alone, together):
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same_everywhere(weights_of(together).tobytes())
    largest = [model.layers[0].inputs_amax_history.numpy().max() for model in (alone, together)]
    assert largest[0] == largest[1] > 1, largest


if BACKEND == "torch":

    @check
    def gradients_in_shared_memory():
        """One tensor for two variables, and one element for a whole variable."""

        class Shares(keras.Model):
            def __init__(self):
                super().__init__()
                ones = {"initializer": "ones"}
                self.pair = [self.add_weight(shape=(6, 1), name=name, **ones) for name in "ab"]
                self.summed = self.add_weight(shape=(4,), name="c", **ones)

            def call(self, x):
                return x @ (self.pair[0] + self.pair[1]) + keras.ops.sum(self.summed)

            def train_step(self, data):
                x, y = data
                loss = keras.ops.mean(keras.ops.square(self(x) - y))
                variables = self.trainable_variables
                gradients = torch.autograd.grad(loss, [each.value for each in variables])
                assert gradients[0] is gradients[1]
                before = [each.clone() for each in gradients]
                with torch.no_grad():
                    self.optimizer.apply(list(gradients), variables)
                assert all(map(torch.equal, gradients, before))
                return {"loss": loss.detach()}

        import torch

        def make(seed):
            model = Shares()
            model(X)
            return model

        alone, together = compiled(make)
        for model in (alone, together):
            model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        assert_in_step(alone, together)

    @check
    def optimizers_in_containers():
        class Contains(Custom):
            def compile(self, *args, **kwargs):
                super().compile(*args, **kwargs)
                self.kept = {"every": [keras.optimizers.SGD(0.05)]}

            def train_step(self, data):
                x, y = data
                self.zero_grad()
                loss = keras.ops.mean(keras.ops.square(self(x) - y))
                loss.backward()
                variables = self.trainable_variables
                self.kept["every"][0].apply([each.value.grad for each in variables], variables)
                return {"own": loss.detach(), "nested": {"metric": loss.detach()}}

        def make(seed):
            keras.utils.set_random_seed(seed)
            return Contains()

        trained(*compiled(make), X, Y)

    @check
    def gradients_that_some_ranks_lack():
        class Branches(keras.Model):
            def __init__(self):
                super().__init__()
                self.used, self.mine = keras.layers.Dense(1), keras.layers.Dense(1)
                self.never = keras.layers.Dense(1)

            def build(self, shape):
                for layer in (self.used, self.mine, self.never):
                    layer.build(shape)

            def call(self, x):
                return self.used(x) + (self.mine(x) if RANK == 0 else 0)

        with STRATEGY.scope():
            model = Branches()
            model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
        assert_same_everywhere(weights_of(model).tobytes())


if BACKEND == "jax":

    @check
    def layers_that_communicate():
        """Their calls and the gradients' come in one order, however many rows a rank has."""
        import collectives.jax as calls

        class Stat(keras.layers.Layer):
            def build(self, shape):
                self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

            def call(self, inputs, training=False):
                if training:
                    own = keras.ops.mean(keras.ops.stop_gradient(inputs), 0)
                    self.mean.assign(0.9 * self.mean + 0.1 * calls.all_reduce(own, "mean"))
                return inputs

        def make(seed):
            keras.utils.set_random_seed(seed)
            dense = partial(keras.layers.Dense, 1, activation="tanh")
            return keras.Sequential([keras.Input((6,)), dense(), Stat(), dense(), Stat()])

        keras.utils.set_random_seed(1 + RANK)
        with STRATEGY.scope():
            together = make(1 + RANK)
            together.compile("sgd", "mse")
        together.fit(X[:6], Y[:6], batch_size=SIZE + 1, epochs=2, verbose=0)
        assert_same_everywhere(weights_of(together).tobytes())

    @check
    def two_optimizers_in_one_program():
        import jax
        import jax.numpy as jnp

        with STRATEGY.scope():
            models = [dense(seed=1 + number) for number in range(2)]
            for model in models:
                model.compile(keras.optimizers.SGD(1.0), "mse")
        optimizers = [model.optimizer for model in models]
        values = [[each.value for each in model.trainable_variables] for model in models]
        for model in models:
            model.optimizer.build(model.trainable_variables)
        states = [[each.value for each in optimizer.variables] for optimizer in optimizers]
        big = jnp.ones((300, 300))

        @jax.jit
        def step(values, states, cost):
            slow = jax.lax.fori_loop(0, cost, lambda _, each: jnp.tanh(each @ big), big).sum()
            results = []
            for number in range(2):
                # Ready later for the one model on rank 0, and for the other on the other ranks.
                later = slow * 0 if number == (RANK > 0) else 0.0
                gradients = [jnp.full_like(each, 1 + 99 * number) + later for each in values[0]]
                optimizer = optimizers[number]
                results.append(
                    optimizer.stateless_apply(states[number], gradients, values[number])[0]
                )
            return results

        for _ in range(3):
            for number, found in enumerate(step(values, states, 40)):
                change = np.asarray(values[number][0]) - np.asarray(found[0])
                np.testing.assert_allclose(change, 1 + 99 * number, rtol=1e-5)

        def exchanged():
            optimizer = optimizers[RANK > 0]
            with collectives.jax.original_errors():
                jax.block_until_ready(optimizer.stateless_apply(states[0], values[0], values[0])[0])

        raised_everywhere(collectives.MismatchError, "optimizer ", exchanged)

    @check
    def eager_steps():
        trained(*compiled(run_eagerly=True), X, Y, epochs=1)
        trained(*compiled(jit_compile=False), X, Y, epochs=1)
        trained(*compiled(steps_per_execution=2), X[:-1], Y[:-1], epochs=1)

    @check
    def all_reduce_of_pytrees():
        import jax
        import jax.numpy as jnp

        import collectives.jax as cj

        tree = {"a": jnp.arange(5.0) + RANK, "b": (jnp.ones((2, 3), jnp.int32) * RANK, jnp.ones(0))}
        ranks = sum(range(SIZE))
        for call in (cj.all_reduce, jax.jit(cj.all_reduce)):
            found = call(tree)
            np.testing.assert_array_equal(found["a"], np.arange(5.0) * SIZE + ranks)
            np.testing.assert_array_equal(found["b"][0], np.full((2, 3), ranks))
        half = jax.jit(lambda value: cj.all_reduce(value, "mean"))(jnp.ones(3, jnp.bfloat16) * RANK)
        np.testing.assert_array_equal(half.astype(float), np.full(3, ranks / SIZE))
        gradient = jax.grad(lambda value: (cj.all_reduce(value, "mean") ** 2).sum())(tree["a"])
        np.testing.assert_allclose(gradient, 2 * (np.arange(5) + ranks / SIZE) / SIZE)

        @jax.jit
        def chained(value):
            first = cj.all_reduce(value)
            return first, cj.all_reduce(value[:2], "max", after=first)

        np.testing.assert_array_equal(chained(tree["a"])[1], np.arange(2.0) + SIZE - 1)
        assert cj.uses_ffi()

    @check
    def errors_within_programs():
        import jax
        import jax.numpy as jnp

        import collectives.jax as cj
        from collectives.jax import host_calls

        def failing(together):
            if RANK == SIZE - 1:
                communicator = together.fit.__self__._training.communicator
                together.train_function = lambda *_: communicator.all_reduce(np.ones(2, np.int8))
            return together

        _, together = compiled()
        together.train_on_batch(X, Y)
        step = partial(failing(together).train_on_batch, X, Y)
        raised_everywhere(collectives.MismatchError, "int8", step)

        def small(seed):
            return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])

        # Keras assigns such averages at the end of training, after a failed step, too.
        _, together = compiled(small, lambda: keras.optimizers.SGD(0.1, use_ema=True))
        raised = None
        try:
            failing(together).fit(X, Y, batch_size=4, verbose=0)
        except (collectives.MismatchError, TypeError) as error:
            raised = error
        # On the rank whose own function has failed, Keras's.
        expected = TypeError if RANK == SIZE - 1 else collectives.MismatchError
        assert isinstance(raised, expected), raised
        value = jnp.ones(3 + RANK)
        uses_ffi = host_calls.uses_ffi
        for used in (True, False):  # without, by pure_callback
            host_calls.uses_ffi = lambda used=used: used and uses_ffi()
            reduce = jax.jit(lambda value: cj.all_reduce(value))

            def raises(reduce=reduce):
                with cj.original_errors():
                    jax.block_until_ready(reduce(value))

            raised_everywhere(collectives.ShapeMismatchError, "differ", raises)
            raised_everywhere(
                jax.errors.JaxRuntimeError,
                "ShapeMismatchError",
                lambda reduce=reduce: jax.block_until_ready(reduce(value)),
            )
            np.testing.assert_array_equal(reduce(jnp.ones(2)), np.full(2, SIZE))
        host_calls.uses_ffi = uses_ffi


def main():
    names = [each for each in sys.argv[1:] if not each.startswith("--")]
    every = CHECKS | OTHERS
    for name in names or CHECKS:
        text = None
        try:
            every[name]()
        except Exception:
            text = traceback.format_exc()
        texts = WORLD.all_gather_object(text)
        if RANK == 0:
            failed = {rank: each for rank, each in enumerate(texts) if each}
            print(json.dumps({name: failed}), flush=True)


if __name__ == "__main__":
    main()
