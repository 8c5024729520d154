"""LocalSGDStrategy on TensorFlow's variables."""

import functools
import gc
import operator
import weakref

import numpy as np
import pytest

import collectives
import strategies
from tests.slow import slow

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.timeout_seconds(300)]


@pytest.mark.parametrize(
    "traced", ["not", "around run", "within run", "in a method", "of a compiled model"]
)
def test_rounds(tf, ds, comm, traced):
    strategy = ds.LocalSGDStrategy(2, communicator=comm)
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        weights = tf.keras.Variable(np.zeros(2, np.float32))
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build([weights])
        if traced == "of a compiled model":
            tf.keras.Sequential().compile(optimizer)

    def step():
        optimizer.apply_gradients([(tf.fill([2], -1.0 - comm.rank), weights)])

    fn = step if traced in ("not", "around run") else tf.function(step)

    class Trainer:
        def step(self):
            fn()

    trainer = Trainer()

    def run():
        strategy.run(trainer.step if traced == "in a method" else fn)

    call = tf.function(run) if traced == "around run" else run
    mean = (comm.size + 1) / 2
    call()
    np.testing.assert_allclose(weights.numpy(), [comm.rank + 1.0] * 2)
    call()
    np.testing.assert_allclose(weights.numpy(), [2 * mean] * 2)
    call()
    np.testing.assert_allclose(weights.numpy(), [2 * mean + comm.rank + 1.0] * 2)
    strategy.synchronize()
    np.testing.assert_allclose(weights.numpy(), [3 * mean] * 2)
    call()
    call()
    np.testing.assert_allclose(weights.numpy(), [5 * mean] * 2)


@pytest.mark.parametrize("outer", [False, True])
def test_rounds_of_a_loop_within_a_function(tf, ds, comm, outer):
    """Each iteration is a step, also where a loop within it applies gradients several times."""
    optimizer_of_rounds = strategies.optimizers.SGD(1.0) if outer else None
    strategy = ds.LocalSGDStrategy(2, outer_optimizer=optimizer_of_rounds, communicator=comm)
    with strategy.scope():
        weights = tf.Variable([0.0])
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build([weights])

    def step():
        for _ in tf.range(3):
            optimizer.apply_gradients([(tf.fill([1], -1.0 - comm.rank), weights)])

    @tf.function
    def epoch(steps):
        for _ in tf.range(steps):
            strategy.run(step)

    mean = 3 * (comm.size + 1) / 2
    epoch(5)
    np.testing.assert_allclose(weights.numpy(), [4 * mean + 3 * (comm.rank + 1)])
    epoch(1)
    np.testing.assert_allclose(weights.numpy(), [6 * mean])


@pytest.mark.parametrize("older", [False, True])
def test_a_run_without_an_optimizer_is_no_step(tf, ds, comm, older):
    strategy = ds.LocalSGDStrategy(2, communicator=comm)
    with strategy.scope():
        weights = tf.Variable([0.0])
        if older:
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        else:
            optimizer = tf.keras.optimizers.SGD(1.0)
            optimizer.build([weights])
    own = tf.fill([1], -1.0 - comm.rank)
    evaluate = tf.function(
        lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", own))
    )
    strategy.run(lambda: optimizer.apply_gradients([(own, weights)]))
    assert evaluate().numpy() == own.numpy()
    np.testing.assert_array_equal(weights.numpy(), [comm.rank + 1.0])
    strategy.run(lambda: optimizer.apply_gradients([(own, weights)]))
    np.testing.assert_array_equal(weights.numpy(), [comm.size + 1.0])


def test_calls_within_run_are_of_the_one_replica(tf, ds, comm):
    """One rank makes more of them than the others, and derives its own rows."""
    strategy = ds.LocalSGDStrategy(3, communicator=comm)

    def step(own):
        context = tf.distribute.get_replica_context()
        context.all_reduce("SUM", {"own": own})
        with tf.GradientTape() as tape:
            tape.watch(own)
            rows = context.all_gather(own, axis=0)
            loss = tf.reduce_sum(rows * rows)
        return rows, tape.gradient(loss, own)

    own = tf.fill([2, 1], comm.rank + 1.0)
    for _ in range(1 + comm.rank):
        rows, gradient = strategy.run(step, args=(own,))
    np.testing.assert_array_equal(rows, own)
    np.testing.assert_array_equal(gradient, 2 * own)
    assert strategy.gather(own, axis=0).shape == (2 * comm.size, 1)


def test_batches_and_arguments(tf, ds, comm):
    strategy = ds.LocalSGDStrategy(3, communicator=comm)
    dataset = tf.data.Dataset.range(10).batch(2)
    steps = list(strategy.experimental_distribute_dataset(dataset))
    own = [strategy.experimental_local_results(each)[0].numpy().tolist() for each in steps]
    assert [len(each) for each in own] == [2, 2, 1]
    assert sorted(
        functools.reduce(
            operator.iadd, comm.all_gather_object(functools.reduce(operator.iadd, own, [])), []
        )
    ) == [*range(10)]
    with pytest.raises(ValueError, match="at least 1"):
        ds.LocalSGDStrategy(0, communicator=comm)
    with pytest.raises(ValueError, match="arguments differ"):
        ds.LocalSGDStrategy(1 + comm.rank, communicator=comm)


@pytest.mark.parametrize("traced", [False, True])
def test_outer_optimizer(tf, ds, comm, traced):
    """Two rounds of DiLoCo's optimizer, in float64; the model is built in the first step."""
    outer = strategies.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    strategy = ds.LocalSGDStrategy(2, outer_optimizer=outer, communicator=comm)
    with strategy.scope():
        layer = tf.keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros", dtype="float64"
        )
        optimizer = tf.keras.optimizers.SGD(1.0)

    def step():
        with tf.GradientTape() as tape:
            loss = -(1.0 + comm.rank) * tf.reduce_sum(layer(tf.ones((1, 3), tf.float64)))
        weights = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    def run():
        strategy.run(step)

    call = tf.function(run) if traced else run
    mean, value, velocity = (comm.size + 1) / 2, 0.0, 0.0
    for _ in range(2):
        call()
        np.testing.assert_allclose(layer.kernel.numpy(), np.full((3, 1), value + comm.rank + 1.0))
        call()
        velocity = 0.9 * velocity + 0.7 * 2 * mean
        value += 0.9 * velocity + 0.7 * 2 * mean
        np.testing.assert_allclose(layer.kernel.numpy(), np.full((3, 1), value))
    strategy.synchronize()  # without steps it changes nothing
    np.testing.assert_allclose(layer.kernel.numpy(), np.full((3, 1), value))
    assert outer.iterations == 2


@pytest.mark.parametrize("outer", [False, True])
def test_a_variable_that_one_rank_has_dropped(tf, ds, comm, outer):
    """Each rank's garbage collector decides when those of a model are gone."""
    optimizer_of_rounds = strategies.optimizers.SGD(1.0) if outer else None
    strategy = ds.LocalSGDStrategy(1, outer_optimizer=optimizer_of_rounds, communicator=comm)
    with strategy.scope():
        dropped, weights = tf.Variable([5.0]), tf.Variable([0.0, 0.0])
        optimizer = tf.keras.optimizers.SGD(1.0)
    gone = weakref.ref(dropped)
    if comm.rank == 0:
        del dropped
        gc.collect()
        assert gone() is None
    gradient = tf.fill([2], -1.0 - comm.rank)
    for traced in (False, True):
        step = functools.partial(optimizer.apply_gradients, [(gradient, weights)])
        strategy.run(tf.function(step) if traced else step)
    np.testing.assert_allclose(weights.numpy(), [comm.size + 1.0] * 2)


def test_a_variable_that_some_ranks_do_not_train(tf, ds, comm):
    """One that a rank has dropped, or made after its trace, is unknown; this one is there."""
    from strategies.tensorflow import local_sgd

    local_sgd._refuse_untrained([[-1, -1], [-2, 0], [-2, -1], [0, 1]])
    with pytest.raises(collectives.MismatchError, match=r"variable 1 is .* not on ranks \[1\]"):
        local_sgd._refuse_untrained([[0, 0], [1, -1]])


# What is done in the middle of a round, and what the round then gives, of the mean of 1 + rank.
CHANGES = {
    "restore": (lambda weights, checkpoint, path: checkpoint.read(path), lambda mean: 1 + mean),
    "assign": (lambda weights, *_: weights.assign([1.0]), lambda mean: 1 + mean),
    "add": (lambda weights, *_: weights.assign_add([1.0]), lambda mean: 6 + 2 * mean),
    "own values": (lambda weights, *_: weights.assign(weights * 2), lambda mean: 10 + 5 * mean),
}


@pytest.mark.parametrize("outer", [None, *slow(strategies.optimizers.SGD(1.0))])
def test_fit_ends_with_equal_weights(tf, ds, comm, equal_on_all, outer):
    """Keras assigns the first ones on all ranks but the chief, and averages over steps at last."""
    strategy = ds.LocalSGDStrategy(2, outer_optimizer=outer, communicator=comm)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        optimizer = tf.keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        model.compile(optimizer, "mse", steps_per_execution=2)
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data = inputs, inputs.sum(1, keepdims=True)
    history = model.fit(*data, batch_size=8, epochs=3, verbose=0, validation_data=data)
    equal_on_all(model.get_weights())
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_fit_begins_with_the_mean_of_an_earlier_loop(tf, ds, comm):
    strategy = ds.LocalSGDStrategy(100, communicator=comm)
    with strategy.scope():
        layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = tf.keras.Sequential([tf.keras.Input((1,)), layer])
        model.compile(tf.keras.optimizers.SGD(1.0), "mse")
    gradient = tf.fill([1, 1], -1.0 - comm.rank)
    strategy.run(lambda: model.optimizer.apply([gradient], model.trainable_variables))
    model.optimizer.learning_rate = 0.0
    model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=2, verbose=0)
    assert layer.kernel.numpy() == (comm.size + 1) / 2


def test_outer_values_of_any_shape(tf, ds, comm):
    """Of a scalar, and of a shape that changes."""
    outer = strategies.optimizers.SGD(1.0)
    strategy = ds.LocalSGDStrategy(1, outer_optimizer=outer, communicator=comm)
    with strategy.scope():
        scalar, grows = tf.Variable(0.0), tf.Variable([0.0], shape=[None])
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build([scalar])

    def step():
        optimizer.apply_gradients([(tf.constant(-1.0 - comm.rank), scalar)])

    mean = (comm.size + 1) / 2
    for count in range(1, 4):
        grows.assign(tf.ones([count]))
        strategy.run(step)
        assert float(scalar) == count * mean
        np.testing.assert_array_equal(grows.numpy(), np.ones(count))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("kind", ["tensorflow", "keras"])
def test_values_that_are_changed_within_a_round_of_an_outer_optimizer(
    tf, ds, comm, tmp_path, kind, traced
):
    strategy = ds.LocalSGDStrategy(
        4, outer_optimizer=strategies.optimizers.SGD(0.5), communicator=comm
    )
    with strategy.scope():
        weights = tf.Variable([1.0]) if kind == "tensorflow" else tf.keras.Variable([1.0])
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build([weights])
    checkpoint = tf.train.Checkpoint(weights=weights if kind == "tensorflow" else weights.value)
    path = checkpoint.write(str(tmp_path / "checkpoint"))

    def step():
        optimizer.apply_gradients([(tf.fill([1], -1.0 - comm.rank), weights)])

    for name, (change, expected) in CHANGES.items():
        act = functools.partial(change, weights, checkpoint, path)
        if traced and name != "restore":
            act = tf.function(act)
        weights.assign([5.0])
        for number in range(4):
            if number == 2:
                act()
            strategy.run(step)
        given = comm.all_gather(weights.numpy())
        np.testing.assert_allclose(given, expected((comm.size + 1) / 2), err_msg=name)
        assert (given == given[0]).all()


def test_a_restored_or_frozen_value_is_not_moved_by_momentum(tf, ds, comm):
    outer = strategies.optimizers.SGD(1.0, momentum=0.5)
    strategy = ds.LocalSGDStrategy(3, outer_optimizer=outer, communicator=comm)
    with strategy.scope():
        first, second = tf.Variable([1.0]), tf.Variable([1.0])
        frozen = tf.keras.Variable([1.0])
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build([first, second, frozen])

    def step():
        gradient = tf.fill([1], -1.0 - comm.rank)
        trained = [each for each in (first, second, frozen) if each.trainable]
        optimizer.apply_gradients([(gradient, each) for each in trained])

    for _ in range(3):
        strategy.run(step)
    frozen.trainable = False
    strategy.run(step)
    first.assign([7.0])
    strategy.synchronize()
    mean = (comm.size + 1) / 2
    assert first.numpy() == 7
    np.testing.assert_allclose(frozen.numpy(), 1 + 3 * mean)
    # One round of three steps, one of a step.
    np.testing.assert_allclose(second.numpy(), 1 + 3 * mean + (mean + 0.5 * 3 * mean))


def test_variables_that_a_rounds_first_step_does_not_know(tf, ds, comm):
    """One is made within the round; one is assigned between rounds, after a function's trace."""
    outer = strategies.optimizers.SGD(0.5)
    strategy = ds.LocalSGDStrategy(2, outer_optimizer=outer, communicator=comm)

    def trained(value):
        with strategy.scope():
            weights = tf.Variable([value])
            optimizer = tf.keras.optimizers.SGD(1.0)
            optimizer.build([weights])

        def step():
            optimizer.apply_gradients([(tf.fill([1], -1.0 - comm.rank), weights)])

        return weights, tf.function(lambda: strategy.run(step))

    moved = (comm.size + 1) / 4
    first, step = trained(0.0)
    step()
    later, step_of_later = trained(5.0)
    step_of_later()
    given = comm.all_gather(np.stack([first.numpy(), later.numpy()], axis=1))
    np.testing.assert_allclose(given, [[moved, 5 + moved]] * comm.size)
    later.assign([100.0])
    step()
    step_of_later()
    given = comm.all_gather(np.stack([first.numpy(), later.numpy()], axis=1))
    np.testing.assert_allclose(given, [[2 * moved, 100 + moved]] * comm.size)


def test_rounds_of_seconds(tf, ds, comm):
    """A round is at most twice as long as the one before; the first has one step."""
    strategy = ds.LocalSGDStrategy(sync_seconds=1e6, communicator=comm)
    with strategy.scope():
        weights = tf.Variable([0.0])
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build([weights])
    call = tf.function(
        lambda: strategy.run(lambda: optimizer.apply_gradients([([-1.0 - comm.rank], weights)]))
    )
    equal = []
    for _ in range(7):
        call()
        found = comm.all_gather_object(float(weights.numpy()[0]))
        equal.append(len(set(found)) == 1)
    assert equal == [True, False, True, False, False, False, True]
    with pytest.raises(ValueError, match="exactly one of them must be given"):
        ds.LocalSGDStrategy(2, 1.0, communicator=comm)
    with pytest.raises(TypeError, match="outer_optimizer is a str"):
        ds.LocalSGDStrategy(2, outer_optimizer="sgd", communicator=comm)


# Of Keras, which reads every distributed variable of TensorFlow in this way when it saves.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")
def test_fit(tf, ds, comm, tmp_path):
    """Each rank trains by itself, on its rows of each batch, until a round ends."""
    keras, random = tf.keras, np.random.default_rng(0)
    images, targets = random.normal(size=(16, 3)).astype("f4"), random.normal(size=(16, 1))

    equal = []

    def fitted(strategy, rows, *callbacks):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        how = {"batch_size": 4 * len(rows) // 16, "epochs": 2, "shuffle": False, "verbose": 0}
        during = []
        seen = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: during.append(model.get_weights()[0].tolist())
        )
        model.fit(images[rows], targets[rows], callbacks=[seen, *callbacks], **how)
        first, second = comm.all_gather_object(during)
        equal.append([one == other for one, other in zip(first, second, strict=True)])
        return model

    every = np.arange(16)
    own = every.reshape(4, comm.size, -1)[:, comm.rank].ravel()
    apart = fitted(ds.LocalSGDStrategy(1000, communicator=comm), every)
    alone = fitted(tf.distribute.get_strategy(), own)
    means = [comm.all_reduce(each, "mean") for each in alone.get_weights()]
    for one, other in zip(apart.get_weights(), means, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    fitted(ds.LocalSGDStrategy(1, communicator=comm), every)
    path = str(tmp_path / "saved.weights.h5")
    saver = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    fitted(ds.LocalSGDStrategy(1000, communicator=comm), every, saver)
    # At the ends of the epochs: in the round, trained apart, averaged at each step, before saving.
    assert equal == [[False, False], [False, False], [True, True], [True, True]]


# Of Keras, which reads every distributed variable of TensorFlow in this way when it saves.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")
@pytest.mark.parametrize("how", ["save_weights", "Checkpoint", "save_model"])
def test_what_all_ranks_save_in_a_round_is_averaged(tf, ds, comm, tmp_path, how):
    path = comm.broadcast_object(str(tmp_path / "saved.weights.h5"))
    strategy, mean = ds.LocalSGDStrategy(1000, communicator=comm), (comm.size + 1) / 2
    with strategy.scope():
        layer = tf.keras.layers.Dense(1, use_bias=False)
        model = tf.keras.Sequential([tf.keras.Input((1,)), layer])
    strategy.run(lambda: layer.kernel.value._primary.assign([[comm.rank + 1.0]]))
    if how == "save_weights":
        model.save_weights(path)
    elif how == "save_model":
        path = path.replace(".weights.h5", ".keras")
        tf.keras.models.save_model(model, path)
    else:
        path = tf.train.Checkpoint(model=model).save(path)
    assert layer.kernel.numpy() == mean
    comm.barrier()
    layer.kernel.value._primary.assign([[0.0]])
    if how == "save_weights":
        model.load_weights(path)
    elif how == "save_model":
        layer.kernel.assign(tf.keras.models.load_model(path).layers[0].kernel)
    else:
        tf.train.Checkpoint(model=model).restore(path)
    assert layer.kernel.numpy() == mean


def test_batches_that_no_rows_can_be_counted_of(tf, ds, comm):
    """Each rank takes whole batches of pipelines that end in another operation, or pad."""
    strategy = ds.LocalSGDStrategy(2, communicator=comm)
    numbers = tf.data.Dataset.range(10)
    ragged = numbers.map(lambda each: tf.fill([each + 1], each))
    kinds = {
        "mapped": (numbers.batch(2).map(lambda each: each * 2).prefetch(1), 2),
        "padded": (ragged.padded_batch(2), 1),
    }
    for kind, (dataset, factor) in kinds.items():
        steps = [
            strategy.experimental_local_results(each)[0].numpy()
            for each in strategy.experimental_distribute_dataset(dataset)
        ]
        wanted = [[factor * 2 * each, factor * (2 * each + 1)] for each in range(comm.rank, 5, 2)]
        own = [
            each[:, 0].tolist() if each.ndim > 1 else each.tolist() for each in steps if len(each)
        ]
        assert own == wanted, kind
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    pairs = ((np.ones((4, 1)), np.ones((4, 1))) for _ in range(8))
    model.fit(pairs, steps_per_epoch=3, verbose=0)


def test_a_rank_without_rows_in_a_batch_does_not_change_its_weights(tf, ds, comm, equal_on_all):
    """The one row has no gradient for the bias, unlike the row of zeros that stands for none."""
    strategy = ds.LocalSGDStrategy(50, communicator=comm)
    bias = tf.keras.initializers.Constant(3.0)
    with strategy.scope():
        dense = tf.keras.Sequential([tf.keras.layers.Dense(1, bias_initializer=bias)])
        rows = tf.keras.layers.Embedding(3, 1, embeddings_initializer="ones")
        embedding = tf.keras.Sequential([tf.keras.Input((), dtype="int32"), rows])
        for model in (dense, embedding):
            model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    dense.fit(np.zeros((1, 4), np.float32), np.full((1, 1), 3, np.float32), verbose=0)
    embedding.fit(np.ones(1, np.int32), np.zeros((1, 1), np.float32), verbose=0)
    equal_on_all([*dense.get_weights(), *embedding.get_weights()])
    np.testing.assert_allclose(dense.get_weights()[1], [3.0])
    np.testing.assert_allclose(rows.get_weights()[0].ravel(), [1, 1 - 0.2 / comm.size, 1], 1e-6)


@pytest.mark.parametrize("traced", [False, True])
def test_a_step_that_overflows_on_one_rank_is_a_step_of_all(tf, ds, comm, scaled_step, traced):
    strategy = ds.LocalSGDStrategy(2, communicator=comm)
    weight, _, step = scaled_step(strategy, 0.1)
    run = tf.function(strategy.run) if traced else strategy.run
    for number in range(4):
        run(step, args=(tf.constant([np.inf if comm.rank and number == 0 else 1.0]),))
    values = comm.all_gather_object(weight.numpy().tolist())
    assert values == [values[0]] * comm.size
    assert 0 < values[0][0] < 1


def test_sums_are_assigned_and_restored_as_they_are_read(tf, ds, comm, tmp_path):
    strategy = ds.LocalSGDStrategy(2, communicator=comm)
    with strategy.scope():
        seen = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    strategy.run(lambda: seen.assign_add(1.0))
    assert float(seen.read_value()) == comm.size
    path = comm.broadcast_object(str(tmp_path))
    checkpoint = tf.train.Checkpoint(seen=seen)
    checkpoint.restore(checkpoint.save(f"{path}/state"))
    assert float(seen.read_value()) == comm.size
    seen.assign(10.0)
    assert float(seen.read_value()) == 10
    strategy.run(lambda: seen.assign(3.0))
    assert float(seen.read_value()) == 3 * comm.size


def test_a_dataset_that_is_distributed_within_a_function(tf, ds, comm):
    strategy = ds.LocalSGDStrategy(2, communicator=comm)
    data = tf.data.Dataset.range(8).batch(2)

    @tf.function
    def total():
        found = tf.constant(0, tf.int64)
        for batch in strategy.experimental_distribute_dataset(data):
            own = strategy.run(tf.reduce_sum, args=(batch,))
            found += strategy.experimental_local_results(own)[0]
        return found

    assert sum(comm.all_gather_object(int(total()))) == 28
