"""Training by Horovod's tape, optimizer, callbacks and layers, against one process."""

import numpy as np
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def rows_of(rank, steps=4, rows=6):
    draw = np.random.default_rng(100 + rank).normal
    inputs = draw(size=(steps * rows, 3)).astype("float32")
    return inputs, inputs.sum(1, keepdims=True) ** 2


def rows_of_all(size, steps=4, rows=6):
    """The ranks' rows, so that a batch has those of all ranks' batches."""
    parts = [rows_of(rank, steps, rows) for rank in range(size)]
    cut = [[np.split(each, steps) for each in part] for part in parts]
    return [
        np.concatenate([part[which][step] for step in range(steps) for part in cut])
        for which in range(2)
    ]


def make_model(keras, *middle):
    keras.utils.set_random_seed(5)
    first, last = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
    return keras.Sequential([keras.Input((3,)), first, *middle, last])


def equal_on_all(comm, arrays):
    contents = comm.all_gather_object([np.asarray(each).tobytes() for each in arrays])
    assert all(each == contents[0] for each in contents)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")
@pytest.mark.parametrize(("passes", "eagerly"), [(1, False), (2, False), (2, True)])
def test_fit_is_that_of_one_process(tf, hvd, keras, comm, passes, eagerly, tmp_path):
    alone = make_model(keras)
    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5), "mse")
    batch, options = 6 * comm.size * passes, {"shuffle": False, "verbose": 0, "epochs": 2}
    alone.fit(*rows_of_all(comm.size), batch_size=batch, **options)

    model = make_model(keras)
    if comm.rank:
        model.set_weights([each + 1 for each in model.get_weights()])
    plain = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)
    optimizer = hvd.DistributedOptimizer(
        plain, backward_passes_per_step=passes, average_aggregated_gradients=True
    )
    if comm.rank == 0:
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    logs = model.fit(
        *rows_of(comm.rank),
        batch_size=6,
        callbacks=[start, hvd.callbacks.MetricAverageCallback()],
        **options,
    )
    equal_on_all(comm, model.get_weights())
    for own, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(own, wanted, atol=1e-5)
    assert len(set(comm.all_gather_object(logs.history["loss"][-1]))) == 1
    assert int(optimizer.iterations) == 8

    path = tmp_path / "model.keras"
    model.save(path)
    assert type(keras.models.load_model(path).optimizer) is keras.optimizers.SGD
    again = hvd.load_model(path)
    assert int(again.optimizer.iterations) == 8
    again.fit(*rows_of(comm.rank), batch_size=6, verbose=0)
    equal_on_all(comm, again.get_weights())
    # A model that was never compiled has none.
    keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]).save(path)
    assert not hasattr(hvd.load_model(path), "optimizer")


def test_all_ranks_leave_out_a_step_that_overflows_on_one(tf, hvd, keras, comm):
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
    optimizer = hvd.PartialDistributedOptimizer(plain, op=hvd.Sum)
    assert optimizer is plain
    weight = keras.Variable(1.0)
    for gradient in (np.inf if comm.rank else 1.0, comm.rank + 1.0):
        optimizer.apply([tf.constant(4.0 * gradient, "float32")], [weight])
    # The first step halves the scale.
    total = sum(2.0 * (rank + 1) for rank in range(comm.size))
    np.testing.assert_allclose(weight, 1.0 - 0.5 * total)


def test_the_tape_averages(tf, hvd, keras, comm):
    table = tf.Variable(np.arange(8.0).reshape(4, 2))
    own, unused = tf.Variable(2.0, dtype="float64"), tf.Variable(1.0)
    factor = comm.rank + 1.0

    @tf.function
    def gradients(sparse_as_dense):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [0, comm.rank])
            loss = factor * own * tf.reduce_sum(rows)
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense)
        tape.register_local_source(own)
        return tape.gradient(loss, {"table": table, "own": own, "unused": unused})

    wanted = np.zeros((4, 2))
    for rank in range(comm.size):
        for row in (0, rank):
            wanted[row] += 2 * (rank + 1) / comm.size
    for sparse_as_dense in (False, True):
        found = gradients(sparse_as_dense)
        assert isinstance(found["table"], tf.IndexedSlices) == (not sparse_as_dense)
        np.testing.assert_allclose(tf.convert_to_tensor(found["table"]), wanted)
        rows = np.arange(8.0).reshape(4, 2)[[0, comm.rank]]
        np.testing.assert_allclose(found["own"], factor * rows.sum() / comm.size)
        assert found["unused"] is None


def test_layers_that_stay_each_ranks_own(tf, hvd, keras, comm):
    model = make_model(keras)
    x, y = rows_of(comm.rank)
    with hvd.PartialDistributedGradientTape(
        tf.GradientTape(), local_layers=model.layers[0], scale_local_gradients=False
    ) as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    local, others = tape.get_local_and_global_gradients(loss, model.trainable_variables)
    assert [len(local), len(others)] == [2, 2]
    equal_on_all(comm, [gradient for _, gradient in others])
    kernels = comm.all_gather_object(local[0][1].numpy())
    assert not np.allclose(kernels[0], kernels[1])


def test_ranks_with_fewer_batches_join(tf, hvd, comm):
    weight = tf.Variable(0.0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = weight * (comm.rank + 1.0)
        gradient = hvd.DistributedGradientTape(tape).gradient(loss, weight)
        weight.assign_sub(gradient)

    for _ in range(2 + comm.rank):
        step()
    if comm.rank == comm.size - 1:
        for call in (
            lambda: hvd.allreduce(tf.IndexedSlices(tf.ones(1), [0])),
            lambda: hvd.allreduce(tf.ones(1), op=hvd.Max),
        ):
            with pytest.raises(NotImplementedError, match="have joined"):
                call()
    last = hvd.join()
    assert int(last) == comm.size - 1
    hvd.broadcast_variables([weight], int(last))
    ranks = [rank + 1 for rank in range(comm.size) for _ in range(2 + rank)]
    np.testing.assert_allclose(weight, -sum(ranks) / comm.size, rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_normalization_is_over_the_rows_of_all_ranks(tf, hvd, keras, comm, masked):
    counts = [2 + 3 * rank for rank in range(comm.size)]
    every = np.random.default_rng(3).normal(100.0, 2.0, (sum(counts), 4, 3))
    mask = np.arange(sum(counts) * 4).reshape(-1, 4) % 3 > 0 if masked else None
    place = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
    factors = tf.constant(np.random.default_rng(4).normal(size=every.shape))

    def of(kind, rows, mask, factors):
        layer, given = kind(dtype="float64"), tf.constant(rows)
        with tf.GradientTape() as tape:
            tape.watch(given)
            given_mask = None if mask is None else tf.constant(mask)
            result = layer(given, training=True, mask=given_mask)
            loss = tf.reduce_sum(result * factors)
        return result, tape.gradient(loss, given), layer.moving_mean, layer.moving_variance

    wanted = of(keras.layers.BatchNormalization, every, mask, factors)
    own_mask = None if mask is None else mask[place]
    found = of(hvd.SyncBatchNormalization, every[place], own_mask, factors[place])
    for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_allclose(got, want[place] if number < 2 else want, rtol=1e-5, atol=1e-6)


def test_learning_rates_follow_callbacks(tf, hvd, keras, comm):
    seen = []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate))

    model, size = make_model(keras), comm.size
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=2),
        Seen(),
    ]
    history = model.fit(*rows_of(comm.rank), batch_size=6, epochs=4, verbose=0, callbacks=callbacks)
    growing = [0.8 * (1 + (number + 1) / 8 * (size - 1)) / size for number in range(8)]
    np.testing.assert_allclose(seen, [*growing, *4 * [0.8], *4 * [0.4]], rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], seen[3::4])


def test_weights_that_are_not_broadcast(tf, hvd, keras, comm):
    """Those that are local, by Keras's variable or TensorFlow's; and of a model built in part."""
    layer = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    start = hvd.callbacks.BroadcastGlobalVariablesCallback
    for local in (layer.bias, [layer.bias.value], layer.bias.value, None):
        model.set_weights([np.full(shape, comm.rank + 1.0) for shape in ((2, 1), (1,))])
        model.fit(*rows_of_ones(), verbose=0, callbacks=[start(0, local_variables=local)])
        assert layer.kernel.numpy().tolist() == [[1.0], [1.0]]
        assert layer.bias.numpy().tolist() == [1.0 if local is None else comm.rank + 1.0]

    class Partly(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def build(self, shape):
            self.factor = self.add_weight(shape=(1,), name="factor")
            self.built = True

        def call(self, x):
            return self.inner(x) * self.factor

    partly = Partly()
    partly.build((None, 2))
    partly.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    factor = partly.factor
    factor.assign([comm.rank + 1.0])
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: factors.append(float(factor.numpy()[0]))
    )
    factors = []
    partly.fit(*rows_of_ones(), verbose=0, callbacks=[start(0), seen])
    assert factors == [1.0]
    equal_on_all(comm, partly.get_weights())


def rows_of_ones():
    return np.ones((4, 2)), np.ones((4, 1))


def test_wrong_optimizers_are_refused(tf, hvd, keras):
    with pytest.raises(TypeError, match="must be one of Keras"):
        hvd.DistributedOptimizer("adam")
    with pytest.raises(ValueError, match="must be at least 1"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    with pytest.raises(TypeError, match=r"device=.*must be a str"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), None, "", "", hvd.Compression.fp16)
    with pytest.raises(ValueError, match="'other' has no variables before it is built"):
        hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(), local_layers=keras.layers.Dense(1, name="other")
        )
    unbuilt = hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="build"):
        unbuilt.apply([tf.ones([1])])
    plain = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        hvd.DistributedOptimizer(plain, backward_passes_per_step=2)


def test_loss_scaling_around_it_is_refused(tf, hvd, keras, comm):
    model = make_model(keras)
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ValueError, match="scales losses around"):
        model.fit(*rows_of(comm.rank), verbose=0, callbacks=[start])


def test_passes_belong_to_their_variables(tf, hvd, keras, comm):
    first, second = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=3)
    optimizer.build([first, second])
    one, ten = tf.constant(1.0 + comm.rank), tf.constant(10.0)
    optimizer.apply([one, None], [first, second])
    optimizer.apply([ten, one], [second, first])
    assert (float(first), float(second)) == (0, 0)
    optimizer.apply([ten], [second])
    np.testing.assert_allclose(first, -(comm.size + 1))
    assert (float(second), int(optimizer.iterations)) == (-20, 3)


def test_passes_begin_anew_when_all_have_joined(tf, hvd, keras, comm):
    weight = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for _ in range(2 + comm.rank):
        optimizer.apply([tf.constant(10.0)], [weight])
    last = int(hvd.join())
    hvd.broadcast_variables([weight.value], last)
    before = float(weight)
    for _ in range(2):
        optimizer.apply([tf.constant(1.0)], [weight])
    assert float(weight) == before - 2


def test_passes_are_compared_and_in_one_order(tf, hvd, keras, comm):
    odd = comm.rank == 1

    def made(**options):
        variables = [keras.Variable(0.0), keras.Variable(0.0)]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        optimizer.build(variables)
        return variables, optimizer

    variables, optimizer = made(backward_passes_per_step=2)
    for number in (1, 0) if odd else (0, 1):
        optimizer.apply([tf.constant(1.0 + 9 * number)], [variables[number]])
    assert list(map(float, variables)) == [-1, -10]
    variables, optimizer = made(backward_passes_per_step=2)
    optimizer.apply([tf.constant(1.0)], [variables[odd]])
    with pytest.raises(hvd.HorovodInternalError, match=r"variable, none of \[1\]"):
        optimizer.apply([tf.constant(1.0)], [variables[odd]])
    for options in (
        {"backward_passes_per_step": 1 + odd},
        {"backward_passes_per_step": 2, "average_aggregated_gradients": odd},
    ):
        variables, optimizer = made(**options)
        passes = options["backward_passes_per_step"]
        for _ in range(passes - 1):
            optimizer.apply([tf.constant(1.0)] * 2, variables)
        with pytest.raises(hvd.HorovodInternalError, match=f"{passes} passes per step"):
            optimizer.apply([tf.constant(1.0)] * 2, variables)
        assert float(variables[0]) == 0
    kinds = tf.keras.optimizers
    for plain, text in (
        (kinds.Adam(1.0) if odd else kinds.SGD(1.0), "Adam"),
        (kinds.SGD(1.0, momentum=0.5 * odd), "momentum"),
    ):
        variable = tf.Variable(0.0)
        with pytest.raises(hvd.HorovodInternalError, match=text):
            hvd.DistributedOptimizer(plain).apply([tf.constant(1.0)], [variable])
        assert float(variable) == 0
    # Learning rates may differ, as that of a warmup does.
    hvd.DistributedOptimizer(kinds.SGD(1.0 + odd)).apply([tf.constant(1.0)], [variable])


def test_passes_of_functions_with_other_variables(tf, hvd, keras):
    """A function knows the sums of its own trace: another one's would be left out of the step."""
    first, second = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build([first, second])
    one = tf.constant(1.0)
    of_first = tf.function(lambda: optimizer.apply([one], [first]))
    of_both = tf.function(lambda: optimizer.apply([one, one], [first, second]))
    of_first()
    of_first()
    of_both()
    with pytest.raises(tf.errors.InvalidArgumentError, match="first gradient after this"):
        of_first()
    of_both()
    assert float(second) == -2


def test_gradients_of_other_variables_are_not_mixed(tf, hvd, comm):
    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    losses = {
        "another variable": lambda: 3 * variables[comm.rank > 0],
        "none": lambda: tf.constant(3.0) if comm.rank else 3 * variables[0],
        "the same": lambda: (comm.rank + 1) * variables[0],
    }
    for name, loss_of in losses.items():
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of()
        if name == "the same":
            assert float(tape.gradient(loss, variables)[0]) == (comm.size + 1) / 2
            continue
        with pytest.raises(hvd.HorovodInternalError):
            tape.gradient(loss, variables)


def test_variables_in_another_order_on_one_rank_are_refused(tf, hvd, keras, comm):
    odd = comm.rank == 1
    variables = [keras.Variable(0.0, name="first"), keras.Variable(0.0, name="second")]
    ordered = variables[::-1] if odd else variables
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(variables)
    gradients = [tf.constant(1.0), tf.constant(2.0)]
    for call in (
        lambda: optimizer.apply(gradients, ordered),
        lambda: hvd.broadcast_variables(ordered, 0),
    ):
        with pytest.raises(hvd.HorovodInternalError, match="2 variables: first, second"):
            call()
    optimizer.apply(gradients, variables)
    assert list(map(float, variables)) == [-1, -2]
    sources = [tf.Variable(1.0, name="one"), tf.Variable(2.0, name="two")]
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = sources[0] * sources[1]
    with pytest.raises(hvd.HorovodInternalError, match="2 variables: one, two"):
        tape.gradient(loss, sources[::-1] if odd else sources)
    layer = hvd.SyncBatchNormalization(momentum=0.5 if odd else 0.9)
    with pytest.raises(hvd.HorovodInternalError, match=r"momentum=0\.5"):
        layer(tf.ones((4, 3)), training=True)
