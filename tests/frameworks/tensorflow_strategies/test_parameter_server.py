"""ParameterServerStrategy on TensorFlow's variables: workers, each with its own script."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from collectives import MismatchError, ShapeMismatchError
from tests.frameworks.tensorflow_strategies.served import run_workers, together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout_seconds(300)]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("traced", [False, True])
def test_steps_add_up(tf, ds, comm, traced):
    """Each worker's step adds to the servers' values; reads see the sum."""

    def work(strategy):
        rank = strategy._served.input_context.input_pipeline_id
        with strategy.scope():
            weights = tf.Variable(np.full((3, 2), 1.0 + rank), dtype=tf.float32)
            steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            flag = tf.Variable(False)
            total = tf.keras.metrics.Mean()
            first = tf.constant([np.inf, -np.inf, 1.0, np.nan])
            extremes = tf.Variable(
                first, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, trainable=False
            )
        assert isinstance(weights, tf.distribute.DistributedValues)
        assert strategy.num_replicas_in_sync == 1
        np.testing.assert_array_equal(weights.numpy(), 1.0)  # the chief's

        def step(factor):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights) * factor
            weights.assign_sub(tape.gradient(loss, weights))
            steps.assign_add(1)
            flag.assign(True)
            total.update_state(loss)
            return tf.reduce_sum(weights)

        def run(factor):
            return strategy.run(step, args=(factor,))

        call = tf.function(run) if traced else run
        together(strategy)
        own = [float(call(tf.constant(1.0 + rank))) for _ in range(2)]
        together(strategy)
        assert own[1] < own[0]
        # Two steps of 1.0, and two of 2.0.
        np.testing.assert_array_equal(weights.numpy(), np.full((3, 2), 1.0 - 6.0))
        assert int(steps.numpy()) == 4
        assert bool(flag.numpy())
        assert float(total.count.numpy()) == 2  # its own
        together(strategy)
        if strategy.is_chief:
            weights.assign(tf.fill((3, 2), np.float32(np.nan)))
            weights.assign(tf.fill((3, 2), 0.1))
            weights.assign_add(tf.ones((3, 2)))
        together(strategy)
        np.testing.assert_allclose(tf.function(lambda: weights + 0.0)(), 1.1)
        with pytest.raises(ValueError, match="incompatible"):
            weights.assign(tf.zeros(5))
        for value in (3.0, 5.0) if strategy.is_chief else ():
            largest = 3e38 if value == 3.0 else -3e38  # their difference is infinite
            wanted = np.array([value, -np.inf, largest, np.nan], np.float32)
            assign = lambda wanted=wanted: extremes.assign(wanted)  # noqa: E731
            strategy.run(tf.function(assign) if traced else assign)
            np.testing.assert_array_equal(extremes.numpy(), wanted)
        return weights.numpy().tolist()

    results = run_workers(ds, comm, work)
    assert results[0] is None
    assert results[1] == results[2]


def compiled(tf, strategy):
    with strategy.scope():
        tf.keras.utils.set_random_seed(3)
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(4, "tanh"),
                tf.keras.layers.BatchNormalization(),
                tf.keras.layers.Dense(1),
            ]
        )
    # Outside of the scope, in which Keras makes the optimizer nevertheless.
    model.compile("adam", "mse", metrics=["mae"])
    model.optimizer.learning_rate = 0.05
    return model


def rows(count=40):
    inputs = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    return inputs, inputs.sum(axis=1, keepdims=True)


@pytest.mark.ranks(2)
def test_one_worker_fits_as_one_process(tf, ds, comm, folder):
    """Keras's loops, a partitioner of TensorFlow, and a checkpoint that needs no servers."""
    alone = compiled(tf, tf.distribute.get_strategy())
    options = {"epochs": 2, "steps_per_epoch": 4, "shuffle": False, "verbose": 0}
    batches = tf.data.Dataset.from_tensor_slices(rows()).batch(8).repeat()
    losses = alone.fit(batches, **options).history["loss"]

    def work(strategy):
        model = compiled(tf, strategy)
        found = model.fit(batches, **options).history["loss"]
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        kernel = model.layers[0].kernel.value
        assert [each.shape[0] for each in kernel.variables] == [2, 1]
        np.testing.assert_array_equal(tf.concat(kernel.variables, 0), kernel)
        assert int(model.optimizer.iterations.numpy()) == 8
        np.testing.assert_allclose(
            model.evaluate(*rows(), verbose=0), alone.evaluate(*rows(), verbose=0), rtol=1e-4
        )
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.save(str(folder / "of_servers"))
        weights = model.get_weights()
        model.set_weights([each + 1.0 for each in weights])
        checkpoint.restore(path).assert_consumed()
        for one, other in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, other)
        return path, weights

    split = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    path, weights = run_workers(ds, comm, work, variable_partitioner=split)[1]
    tf.train.Checkpoint(model=alone).restore(path).expect_partial()
    for one, other in zip(alone.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.ranks(3)
def test_workers_fit(tf, ds, comm, folder):
    """Each on its own rows; what the chief restores counts for the others."""

    def work(strategy):
        def dataset_fn(context):
            data = tf.data.Dataset.from_tensor_slices(rows())
            own = data.shard(context.num_input_pipelines, context.input_pipeline_id)
            return own.batch(4).repeat()

        model = compiled(tf, strategy)
        data = strategy.distribute_datasets_from_function(dataset_fn)
        options = {"steps_per_epoch": 10, "shuffle": False, "verbose": 0}
        first = model.fit(data, epochs=1, **options).history["loss"][0]
        last = model.fit(data, epochs=4, **options).history["loss"][-1]
        assert last < first
        together(strategy)
        assert int(model.optimizer.iterations.numpy()) == 2 * 50
        weights = model.get_weights()
        checkpoint = tf.train.Checkpoint(model=model)
        if strategy.is_chief:
            checkpoint.write(str(folder / "of_chief"))
            model.set_weights([np.zeros_like(each) for each in weights])
        together(strategy)
        assert not np.any(model.get_weights()[0])
        together(strategy)
        checkpoint.read(str(folder / "of_chief"))
        for one, other in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, other)
        together(strategy)
        return [each.tolist() for each in weights]

    results = run_workers(ds, comm, work, staleness=3)
    assert results[1] == results[2]


@pytest.mark.ranks(3)
def test_variables_of_other_names_or_rules_than_the_chiefs(tf, ds, comm, folder):
    """Values of different variables would be exchanged; a worker's own ones are restored by it."""
    on_read = {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    }
    pairs = [
        ({"name": "a"}, {"name": "b"}),
        ({"trainable": False}, {}),
        ({"aggregation": tf.VariableAggregation.SUM}, {}),
    ]

    def work(strategy):
        rank = strategy._served.input_context.input_pipeline_id
        with strategy.scope():
            for pair in pairs:
                if rank == 0:
                    tf.Variable(1.0, **pair[0])
                else:
                    tf.Variable(rank, **on_read)  # its own, which others need not make
                    with pytest.raises(MismatchError, match="the chief's is variable"):
                        tf.Variable(1.0, **pair[1])
            own = tf.Variable(5.0 + rank, trainable=False, **on_read)
            shared = [tf.Variable(number) for number in (1.0, 2.0, 3.0)]
        checkpoints = [tf.train.Checkpoint(one=each) for each in shared]
        of_own = tf.train.Checkpoint(own=own)
        path = str(folder / f"of_names_{rank}")
        written = of_own.write(path)
        own.assign(0.0)
        of_own.read(written)
        file = str(folder / "of_names")
        if rank == 0:
            checkpoints[2].write(file)
            shared[2].assign(0.0)
        together(strategy)
        if rank == 0:
            checkpoints[1].read(file)
            checkpoints[2].read(file)
        else:
            with pytest.raises(MismatchError, match=r"restore of .* but the chief calls restore"):
                checkpoints[2].read(file)
            checkpoints[2].read(file)
        together(strategy)
        return float(own.numpy()), [float(each.numpy()) for each in shared]

    results = run_workers(ds, comm, work)
    assert results[1:] == [(5.0, [1.0, 3.0, 3.0]), (6.0, [1.0, 3.0, 3.0])]


@pytest.mark.ranks(3)
def test_errors(tf, ds, comm):
    def work(strategy):
        rank = strategy._served.input_context.input_pipeline_id
        with strategy.scope():
            variable = tf.Variable([1.0, 2.0])
            with pytest.raises(TypeError, match="of numbers or bool"):
                tf.Variable("text")
            with pytest.raises(NotImplementedError, match="per_worker_variable"):
                tf.Variable(0.0, per_worker_variable=True)
            if rank == 0:
                tf.Variable([1.0])
            else:
                with pytest.raises(ShapeMismatchError, match="Variable"):
                    tf.Variable([1.0, 2.0])

        def fails():
            variable.assign_add([1.0, 1.0])
            tf.debugging.assert_equal(variable, 0.0)

        for call in (fails, tf.function(fails)):
            with pytest.raises(tf.errors.InvalidArgumentError):
                strategy.run(call)
            with pytest.raises(tf.errors.InvalidArgumentError):
                tf.function(lambda call=call: strategy.run(call))()

        def interrupted(*_):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(variable._primary), "assign", interrupted)
            with pytest.raises(KeyboardInterrupt):
                strategy.run(lambda: None)
        strategy.run(lambda: None)
        # A copy is this worker's own.
        copied = copy.deepcopy(variable)
        copied.assign_add([rank + 1.0, 0.0])
        strategy.run(lambda: copied.assign_add([1.0, 0.0]))
        np.testing.assert_array_equal(copied, [rank + 3.0, 2.0])
        together(strategy)
        # A step that failed has added nothing.
        np.testing.assert_array_equal(tf.function(lambda: variable + 0.0)(), [1.0, 2.0])
        # A function that was traced in a step pulls outside of it.
        read = tf.function(lambda: variable + 0.0)
        tf.function(lambda: strategy.run(read))()
        together(strategy)
        if rank == 0:
            variable.assign([5.0, 6.0])
        together(strategy)
        np.testing.assert_array_equal(tf.function(lambda: read() + 0.0)(), [5.0, 6.0])

    run_workers(ds, comm, work)
    with pytest.raises(ValueError, match="no job ps"):
        ds.experimental.ParameterServerStrategy(communicator=comm)


def in_thread(call):
    """Call the function in another thread, to its end; its exception."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception()


@pytest.mark.ranks(2)
def test_other_threads_during_a_step(tf, ds, comm):
    """What they read is the servers', what they add is added once, and they run no step."""

    def work(strategy):
        with strategy.scope():
            weights = tf.Variable([1.0, 2.0])
            flag = tf.Variable(7)
        seen, errors = [], []

        def elsewhere():
            seen.append((weights + 0.0).numpy())
            weights.assign_add([10.0, 20.0])
            weights.assign_sub(tf.constant([1.0, 2.0]))
            flag.assign(5)
            seen.append(weights.numpy())

        def step():
            weights.assign_add([100.0, 200.0])
            others = [elsewhere, lambda: strategy.run(lambda: weights.assign_add([1.0, 1.0]))]
            calls = [lambda other=other: errors.append(in_thread(other)) for other in others]
            with tf.control_dependencies([tf.py_function(calls[0], [], [])]):
                tf.py_function(calls[1], [], [])
            weights.assign_add([1000.0, 2000.0])

        def fails():
            weights.assign_add([1.0, 1.0])
            tf.debugging.assert_equal(weights, 0.0)

        expected = np.array([1.0, 2.0])
        for run in (strategy.run, tf.function(lambda call: strategy.run(call))):
            seen.clear()
            errors.clear()
            run(step)
            assert errors[0] is None
            assert isinstance(errors[1], RuntimeError)
            assert "steps of a worker of parameter servers run one at a time" in str(errors[1])
            np.testing.assert_array_equal(seen, [expected, expected * 10])
            expected *= 1110
            np.testing.assert_array_equal(weights.numpy(), expected)
            assert int(flag.numpy()) == 5
            # One that has failed excludes no other.
            with pytest.raises(tf.errors.InvalidArgumentError):
                run(fails)
            run(lambda: weights.assign_sub(weights - [1.0, 2.0]))
            expected = np.array([1.0, 2.0])
            np.testing.assert_array_equal(weights.numpy(), expected)
            flag.assign(7)
        # The derivative of a read outside of a step.
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights**2)
        np.testing.assert_array_equal(tape.gradient(loss, weights), expected * 2)

    run_workers(ds, comm, work)


@pytest.mark.ranks(1)
def test_steps_that_overlap_after_all_add_nothing(ds, monkeypatch):
    """Where the failure of another function was taken for that of the step."""
    from strategies.tensorflow import steps

    present = steps.Steps()
    first = present.begin()
    with pytest.raises(RuntimeError, match="one at a time"):
        present.begin()
    failures = steps.failed()
    monkeypatch.setattr(steps, "failed", lambda: failures + 1)
    second = present.begin()
    for number in (first, second):
        with pytest.raises(RuntimeError, match="one at a time"):
            present.check(number)
    third = present.begin()
    present.check(third)
    present.end(third)
    present.end(present.begin())


@pytest.mark.ranks(3)
def test_additions_of_all_workers_count(tf, ds, comm):
    """Outside of run, Keras's too, which assign the sum of a value that was read before."""
    keras = pytest.importorskip("keras")
    count = 50

    def work(strategy):
        rank = strategy._served.input_context.input_pipeline_id
        with strategy.scope():
            made = [keras.Variable(0, dtype="int32", trainable=False) for _ in range(2)]
            made += [tf.Variable(0), keras.Variable([1.0, 2.0])]
        by_function = tf.function(lambda: made[1].assign_add(1 + rank))
        together(strategy)
        for _ in range(count):
            made[0].assign_add(1 + rank)
            by_function()
            made[2].assign_add(1 + rank)
            made[3].assign_sub(0.5)
        together(strategy)
        assert [int(each.numpy()) for each in made[:3]] == [3 * count] * 3
        np.testing.assert_array_equal(made[3].numpy(), np.array([1.0, 2.0]) - count)
        with pytest.raises(ValueError, match="incompatible"):
            made[2].assign_add([1, 2])

    run_workers(ds, comm, work)


@pytest.mark.ranks(3)
def test_workers_that_halve_the_loss_scale_at_once(tf, ds, comm):
    """The last one counts: the sum of both changes would be a scale of 0, and weights of NaN."""

    def work(strategy):
        with strategy.scope():
            weights = tf.Variable(np.ones(2, np.float32))
            optimizer = tf.keras.optimizers.LossScaleOptimizer(
                tf.keras.optimizers.SGD(1.0), initial_scale=1024.0
            )
            optimizer.build([weights])
            # Of the program, not of the optimizer.
            count = tf.Variable(0, dtype=tf.int64, trainable=False, name="step_counter")
        together(strategy)

        def overflow():
            # Both have pulled before either pushes.
            strategy._served.membership.group.barrier()
            count.assign_add(1)
            optimizer.apply_gradients([(tf.constant([np.inf, 1.0]), weights)])

        strategy.run(overflow)
        together(strategy)
        return float(optimizer.dynamic_scale), int(count), weights.numpy().tolist()

    results = run_workers(ds, comm, work)
    assert [each for each in results if each] == [(512.0, 2, [1.0, 1.0])] * 2
