"""`strategies.estimator`, as `tf.estimator` was, over Keras models."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from collectives import MismatchError
from tests.frameworks.tensorflow_strategies.served import run_workers

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    pytest.mark.timeout_seconds(300),
    pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options"),
]

ROWS = 4
"""Of a replica's batch."""


@pytest.fixture
def estimator(tf):
    from strategies import estimator

    return estimator


def arrays(steps, ranks):
    """Rows in the order of the steps, and within them of the ranks."""
    random = np.random.default_rng(3)
    inputs = random.normal(size=(steps * ranks * ROWS, 3)).astype(np.float32)
    return inputs, inputs @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 1.0


def batches_of(tf, rank, ranks, steps=100):
    """A rank's own batches, as an input function would read its shard."""
    pieces = [
        each.reshape(steps, ranks, ROWS, -1)[:, rank].reshape(steps * ROWS, -1)
        for each in arrays(steps, ranks)
    ]
    return tf.data.Dataset.from_tensor_slices(tuple(pieces)).batch(ROWS)


def made(keras, **how):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"], **how)
    return model


def fitted(tf, comm, steps):
    """Weights of one process that trains on the global batches."""
    model = made(tf.keras)
    data = tf.data.Dataset.from_tensor_slices(arrays(100, comm.size)).batch(ROWS * comm.size)
    model.fit(data.take(steps), verbose=0, shuffle=False)
    return model


def test_train_and_evaluate(tf, ds, estimator, comm, folder, equal_on_all):
    """The numbers are those of one process on the ranks' batches together, after a restart too."""
    calls = []

    def input_fn(input_context, mode):
        calls.append(mode)
        batches = batches_of(tf, input_context.input_pipeline_id, input_context.num_input_pipelines)
        return batches if mode == estimator.ModeKeys.EVAL else batches.skip(skipped)

    strategy = ds.MirroredStrategy(communicator=comm)

    def new():
        config = estimator.RunConfig(
            train_distribute=strategy,
            eval_distribute=strategy,
            model_dir=folder,
            save_checkpoints_steps=4,
            keep_checkpoint_max=2,
        )
        # So many steps don't divide what is to be trained.
        return estimator.Estimator(lambda: made(tf.keras, steps_per_execution=3), config=config)

    skipped = 0
    first = new()
    assert first.train(input_fn, steps=5) is first
    skipped = 5
    again = new()
    train_spec = estimator.TrainSpec(input_fn, max_steps=12)
    found, exported = estimator.train_and_evaluate(
        again, train_spec, estimator.EvalSpec(input_fn, steps=3)
    )
    # Steps 8 and 12 are saved, and each is evaluated.
    assert calls == ["train", "train", "eval", "eval"]
    assert (found.pop("global_step"), exported) == (12, [])
    alone = fitted(tf, comm, 12)
    data = tf.data.Dataset.from_tensor_slices(arrays(100, comm.size)).batch(ROWS * comm.size)
    expected = alone.evaluate(data.take(3), return_dict=True, verbose=0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-5)
    equal_on_all(list(found.values()))
    assert sorted(each.name for each in folder.glob("*.index")) == [
        "model.ckpt-12.index",
        "model.ckpt-8.index",
    ]
    # At max_steps nothing is trained.
    third = new()
    found, _ = estimator.train_and_evaluate(
        third, train_spec, estimator.EvalSpec(input_fn, steps=3)
    )
    assert found["global_step"] == 12
    assert calls == ["train", "train", "eval", "eval", "eval"]
    assert found["mae"] == pytest.approx(expected["mae"], abs=1e-5)
    # Each rank predicts its own rows.
    rows = list(third.predict(lambda: batches_of(tf, comm.rank, comm.size).take(1)))
    own = next(iter(batches_of(tf, comm.rank, comm.size)))[0]
    assert [each.keys() for each in rows] == [{"out"}] * ROWS
    np.testing.assert_allclose([each["out"] for each in rows], alone(own), atol=1e-5)
    # No execution of several steps counts those that the data end within.
    third.train(lambda: batches_of(tf, comm.rank, comm.size).take(2))
    assert third.latest_checkpoint().endswith("model.ckpt-14")
    # Without a checkpoint the model has its first values, though another one was restored.
    path, empty = third.latest_checkpoint(), folder / "empty"
    fourth = estimator.Estimator(lambda: made(tf.keras), str(empty), third.config)
    found = [
        fourth.evaluate(lambda: batches_of(tf, comm.rank, comm.size), 2, None, each)
        for each in (None, path, None)
    ]
    assert found[0] == found[2]
    assert found[0]["mae"] != found[1]["mae"]
    assert [each["global_step"] for each in found] == [0, 14, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The structure of `inputs` doesn't match")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # of Keras, for unknown lengths
def test_the_guide(tf, ds, estimator, comm, equal_on_all):
    """Of "Distributed Training in TensorFlow": its linear estimator, and its input function."""
    mirrored_strategy = ds.MirroredStrategy(communicator=comm)
    config = estimator.RunConfig(
        train_distribute=mirrored_strategy, eval_distribute=mirrored_strategy
    )
    regressor = estimator.LinearRegressor(
        feature_columns=[tf.feature_column.numeric_column("feats")],
        optimizer="SGD",
        config=config,
    )

    def input_fn():
        dataset = tf.data.Dataset.from_tensors(({"feats": [1.0]}, [1.0]))
        return dataset.repeat(1000).batch(10)

    def expected(steps):
        # Each step multiplies the error by 1 - 0.2 * 2 * 2, of the weight and the bias.
        error = 0.2**steps
        return {
            "loss": error**2,
            "average_loss": error**2,
            "label/mean": 1.0,
            "prediction/mean": 1 - error,
            "global_step": steps,
        }

    def path_of(steps):
        return f"{regressor.model_dir}/model.ckpt-{steps}"

    for steps in (1, 4):
        regressor.train(input_fn=input_fn, steps=steps)
        found = regressor.evaluate(input_fn=input_fn, steps=10)
        assert found == pytest.approx(expected(1 if steps == 1 else 5), abs=1e-6)
        equal_on_all(list(found.values()))
    found = [regressor.predict(input_fn, checkpoint_path=path_of(steps)) for steps in (5, 1, 5)]
    for _ in range(2):
        for rows, error in zip(found, (0.2**5, 0.2, 0.2**5), strict=True):
            assert next(rows) == {"predictions": pytest.approx(1 - error)}
    odd = comm.rank == 1
    for path, text in (
        (path_of(1 if odd else 5), "checkpoint 1"),
        (path_of(5) if odd else None, "checkpoint 5"),
        ("no/model.ckpt-5" if odd else path_of(5), "restoring.*refused by NotFoundError"),
        ("other" if odd else path_of(5), "refused by ValueError.*'other' is not an estimator's"),
    ):
        with pytest.raises(MismatchError, match=text):
            regressor.evaluate(input_fn, steps=2, checkpoint_path=path)
    # To the end of the data: ten batches on the first rank, nine and an empty one on the second.
    regressor.train(lambda input_context: input_fn().take(10 - input_context.input_pipeline_id))
    assert regressor.latest_checkpoint().endswith("model.ckpt-15")


@pytest.mark.slow
def test_keras_models(tf, ds, estimator, comm, equal_on_all):
    """A compiled model is copied with its weights; a function is called in the scope."""
    strategy = ds.CentralStorageStrategy(communicator=comm)
    alone = ds.OneDeviceStrategy("/cpu:0")

    def model_fn():
        tf.keras.utils.set_random_seed(5)
        layers = [tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1, name="out")]
        model = tf.keras.Sequential([*layers, tf.keras.layers.BatchNormalization()])
        model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        return model

    def input_fn():
        return batches_of(tf, comm.rank, comm.size)

    model = model_fn()
    before = model.get_weights()
    found = []
    for given in ({"keras_model": model}, {"keras_model_fn": model_fn}):
        config = estimator.RunConfig(train_distribute=strategy, eval_distribute=alone)
        made = estimator.model_to_estimator(**given, config=config)
        made.train(input_fn, max_steps=3).train(input_fn, max_steps=3)
        assert made.latest_checkpoint().endswith("model.ckpt-3")
        # Not distributed: every rank's own rows.
        found.append(made.evaluate(lambda: batches_of(tf, 0, comm.size), steps=2))
    assert found[0] == pytest.approx(found[1])
    assert found[0]["global_step"] == 3
    equal_on_all(list(found[0].values()))
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_not_supported(tf, ds, estimator, comm):
    strategy = ds.MirroredStrategy(communicator=comm)
    config = estimator.RunConfig(train_distribute=strategy)

    def new(model_fn=lambda: made(tf.keras)):
        return estimator.Estimator(model_fn, config=config)

    def data():
        return batches_of(tf, comm.rank, comm.size)

    column = tf.feature_column.numeric_column("x")
    not_compiled = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    for call, error, text in (
        (lambda: new().train(data, hooks=[1]), TypeError, "train: hooks not supported: arguments"),
        (lambda: estimator.TrainSpec(data, 3, hooks=[1]), TypeError, "input_fn, max_steps"),
        (lambda: estimator.EvalSpec(data, exporters=[1]), TypeError, "EvalSpec: exporters not"),
        (lambda: estimator.RunConfig(session_config=1), TypeError, "session_config.*model_dir"),
        (lambda: estimator.RunConfig(save_checkpoints_steps=0), ValueError, "steps=0: must be 1"),
        (
            lambda: estimator.RunConfig(train_distribute=tf.distribute.get_strategy()),
            TypeError,
            r"train_distribute is a _Default\w+: must be a MultiWorkerMirroredStrategy",
        ),
        (lambda: new().train(data, steps=1, max_steps=2), ValueError, "only one may be given"),
        (lambda: new(lambda features, labels: 0), TypeError, "takes features, labels: may take"),
        (lambda: new(lambda: not_compiled).train(data), TypeError, "that it has compiled"),
        (lambda: new().train(lambda: 3), TypeError, "input_fn returned int: must return a tf.data"),
        (
            lambda: estimator.model_to_estimator(not_compiled),
            ValueError,
            "is not compiled: call compile first",
        ),
        (
            lambda: estimator.LinearRegressor([tf.feature_column.bucketized_column(column, [1.0])]),
            TypeError,
            "must be numeric_column",
        ),
        (
            lambda: new().evaluate(data, checkpoint_path="other"),
            ValueError,
            "'other' is not an estimator's",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    last = comm.rank == comm.size - 1

    def fails_on_one():
        if last:
            raise LookupError("no model here")
        return made(tf.keras)

    with pytest.raises(MismatchError, match="no model here"):
        new(fails_on_one).train(data)
    config = estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=3 + last)
    with pytest.raises(MismatchError, match="save_checkpoints_steps=4"):
        new().train(data)


def test_an_evaluator_is_refused(tf, ds, estimator, comm, monkeypatch):
    """On its own rank; the chief could train alone."""
    kind = ("chief", "evaluator")[comm.rank]
    config = {"cluster": {"chief": ["a"]}, "task": {"type": kind, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = ds.MultiWorkerMirroredStrategy(communicator=comm)
    config = estimator.RunConfig(train_distribute=strategy)
    new = estimator.Estimator(lambda: made(tf.keras), config=config)
    if kind == "evaluator":
        with pytest.raises(ValueError, match="TF_CONFIG's task is evaluator"):
            estimator.train_and_evaluate(new, None, None)


@pytest.mark.ranks(3)
def test_a_late_worker_needs_no_file(tf, ds, estimator, comm, folder):
    """The chief deletes what it has restored, once it has saved often enough."""

    def work(strategy):
        late = strategy.cluster_resolver.task_id == 1

        def train(max_steps, restored=None):
            def input_fn():
                end = time.monotonic() + 120
                while late and restored and Path(f"{restored}.index").exists():
                    assert time.monotonic() < end
                    time.sleep(0.05)
                return batches_of(tf, 0, 1).repeat()

            config = estimator.RunConfig(
                folder, train_distribute=strategy, save_checkpoints_steps=5, keep_checkpoint_max=1
            )
            model = estimator.Estimator(lambda: made(tf.keras), config=config)
            model.train(input_fn, max_steps=max_steps)
            return model.latest_checkpoint()

        return train(40, restored=train(5))

    latest = [each for each in run_workers(ds, comm, work) if each is not None]
    assert len(latest) == 2
    assert len(set(latest)) == 1
    assert latest[0].rpartition("-")[2].isdecimal()


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # of Keras, for unknown lengths
def test_training_that_fails_leaves_nothing(tf, ds, estimator, comm, folder):
    """Before its first checkpoint; rows are predicted from the one at their first request."""
    strategy = ds.MirroredStrategy(communicator=comm)
    config = estimator.RunConfig(folder, train_distribute=strategy, keep_checkpoint_max=1)
    first = estimator.Estimator(lambda: made(tf.keras), config=config)

    def data(fails=False):
        def rows():
            for number in range(4):
                if fails and number == 2:
                    raise LookupError("a row is missing")
                yield arrays(1, 1)

        signature = [tf.TensorSpec((None, each.shape[1]), each.dtype) for each in arrays(1, 1)]
        return tf.data.Dataset.from_generator(rows, output_signature=tuple(signature))

    with pytest.raises(Exception, match="a row is missing"):
        first.train(lambda: data(fails=True), steps=4)
    comm.barrier()
    first.train(data, steps=1)
    [after] = [each.model for each in first._models.values()]
    expected = made(tf.keras)
    expected.fit(data().take(1), verbose=0, shuffle=False)
    for one, other in zip(after.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    rows = first.predict(data)
    first.train(data, steps=1)
    assert len(list(rows)) == 4 * ROWS
