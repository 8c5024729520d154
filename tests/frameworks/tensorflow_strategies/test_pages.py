"""The code of tf.distribute's own pages, with only the strategy's import changed.

Data is made here, and what Keras 3 has renamed is as it is now: `reset_states` is `reset_state`.
"""

import contextlib
import io

import numpy as np
import pytest

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    pytest.mark.timeout_seconds(300),
    pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options"),
    pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`"),
    pytest.mark.filterwarnings("ignore:.shuffle=True. was passed"),
]


def images(count):
    random = np.random.default_rng(0)
    return random.random((count, 28, 28), np.float32), random.integers(0, 10, count)


def custom_training(tf, strategy, folder, epochs=2):
    """The tutorial "Custom training with tf.distribute.Strategy", from its strategy to its end."""
    (train_images, train_labels), (test_images, test_labels) = images(40), images(24)
    train_images, test_images = train_images[..., None], test_images[..., None]
    buffer_size = len(train_images)
    batch_size_per_replica = 16 // strategy.num_replicas_in_sync
    global_batch_size = batch_size_per_replica * strategy.num_replicas_in_sync

    train_dataset = (
        tf.data.Dataset.from_tensor_slices((train_images, train_labels))
        .shuffle(buffer_size)
        .batch(global_batch_size, drop_remainder=True)
    )
    test_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels)).batch(
        global_batch_size
    )
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
    test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)

    def create_model():
        regularizer = tf.keras.regularizers.L2(1e-5)
        return tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=regularizer),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Conv2D(64, 3, activation="relu", kernel_regularizer=regularizer),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(64, activation="relu", kernel_regularizer=regularizer),
                tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
            ]
        )

    create_model().summary(print_fn=lambda line: None)
    checkpoint_prefix = str(folder / "ckpt.weights.h5")

    with strategy.scope():
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=tf.keras.losses.Reduction.NONE
        )

        def compute_loss(labels, predictions, model_losses):
            per_example_loss = loss_object(labels, predictions)
            loss = tf.nn.compute_average_loss(per_example_loss)
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
            return loss

    with strategy.scope():
        test_loss = tf.keras.metrics.Mean(name="test_loss")
        train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

    with strategy.scope():
        tf.keras.utils.set_random_seed(2)
        model = create_model()
        optimizer = tf.keras.optimizers.Adam(learning_rate=0.001)
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)

    def train_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        images, labels = inputs
        predictions = model(images, training=False)
        t_loss = loss_object(labels, predictions)
        test_loss.update_state(t_loss)
        test_accuracy.update_state(labels, predictions)

    @tf.function
    def distributed_train_step(dataset_inputs):
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    @tf.function
    def distributed_test_step(dataset_inputs):
        return strategy.run(test_step, args=(dataset_inputs,))

    printed = []
    for epoch in range(epochs):
        total_loss = 0.0
        num_batches = 0
        for x in train_dist_dataset:
            total_loss += distributed_train_step(x)
            num_batches += 1
        train_loss = total_loss / num_batches
        for x in test_dist_dataset:
            distributed_test_step(x)
        if epoch % 2 == 0:
            checkpoint.save(checkpoint_prefix)
        printed += [train_loss, train_accuracy.result(), test_loss.result()]
        printed.append(test_accuracy.result())
        test_loss.reset_state()
        train_accuracy.reset_state()
        test_accuracy.reset_state()

    eval_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    new_model = create_model()
    new_optimizer = tf.keras.optimizers.Adam()

    @tf.function
    def eval_step(images, labels):
        predictions = new_model(images, training=False)
        eval_accuracy(labels, predictions)

    restored = tf.train.Checkpoint(optimizer=new_optimizer, model=new_model)
    restored.restore(tf.train.latest_checkpoint(str(folder)))
    for images_, labels_ in test_dataset:
        eval_step(images_, labels_)
    printed.append(eval_accuracy.result())

    total_loss = 0.0
    num_batches = 0
    train_iter = iter(train_dist_dataset)
    for _ in range(2):
        total_loss += distributed_train_step(next(train_iter))
        num_batches += 1
    printed += [total_loss / num_batches, train_accuracy.result()]
    train_accuracy.reset_state()

    @tf.function
    def distributed_train_epoch(dataset):
        total_loss = 0.0
        num_batches = 0
        for x in dataset:
            per_replica_losses = strategy.run(train_step, args=(x,))
            total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
            num_batches += 1
        return total_loss / tf.cast(num_batches, dtype=tf.float32)

    train_loss = distributed_train_epoch(train_dist_dataset)
    printed += [train_loss, train_accuracy.result()]
    return [float(each) for each in printed], model.get_weights()


@pytest.mark.slow
def test_custom_training(tf, ds, comm, folder, equal_on_all):
    tf.random.set_seed(3)
    strategy = ds.MirroredStrategy(communicator=comm)
    printed, weights = custom_training(tf, strategy, folder / "together")
    tf.random.set_seed(3)
    alone = ds.OneDeviceStrategy("/cpu:0")
    expected, weights_alone = custom_training(tf, alone, folder / f"alone{comm.rank}")
    np.testing.assert_allclose(printed, expected, rtol=1e-3)
    for one, other in zip(weights, weights_alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)  # Adam enlarges rounding
    equal_on_all(weights)


def test_the_guide(tf, ds, comm, equal_on_all):
    """Of "Distributed Training in TensorFlow": Keras, and its custom loop."""
    tf.keras.utils.set_random_seed(1)
    mirrored_strategy = ds.MirroredStrategy(communicator=comm)
    with mirrored_strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
        model.compile(loss="mse", optimizer="sgd")
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
    with contextlib.redirect_stdout(io.StringIO()):
        model.fit(dataset, epochs=2)
        evaluated = model.evaluate(dataset)
        inputs, targets = np.ones((100, 1)), np.ones((100, 1))
        model.fit(inputs, targets, epochs=2, batch_size=10)
    assert 0 < evaluated < 1
    equal_on_all(model.get_weights())

    batch_size_per_replica = 5
    global_batch_size = batch_size_per_replica * mirrored_strategy.num_replicas_in_sync
    with mirrored_strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    with mirrored_strategy.scope():
        dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(1000)
        dataset = dataset.batch(global_batch_size)
        dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def train_step(dist_inputs):
        def step_fn(inputs):
            features, labels = inputs
            with tf.GradientTape() as tape:
                logits = model(features)
                error = tf.reduce_sum((logits - labels) ** 2)
                loss = error * (1.0 / global_batch_size)
            variables = [each.value for each in model.trainable_variables]
            gradients = tape.gradient(loss, model.trainable_variables)
            train_op = optimizer.apply_gradients(zip(gradients, variables, strict=True))
            with tf.control_dependencies([train_op]):
                return tf.identity(loss)

        per_replica_losses = mirrored_strategy.experimental_run_v2(step_fn, args=(dist_inputs,))
        return mirrored_strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    input_iterator = iter(dist_dataset)
    losses = [float(train_step(next(input_iterator))) for _ in range(10)]
    # Each step on the mean over all replicas: the error times 1 - 2 * 0.1 * 2, squared.
    np.testing.assert_allclose(losses[1:], np.array(losses[:-1]) * 0.36, rtol=1e-3, atol=1e-7)
    equal_on_all(model.get_weights())


def test_the_reference(tf, ds, comm):
    """The examples of the page of a strategy's methods."""
    strategy = ds.MirroredStrategy(communicator=comm)

    def value_fn(context):
        return tf.constant(1.0)

    distributed = strategy.experimental_distribute_values_from_function(value_fn)
    assert strategy.experimental_local_results(distributed) == (tf.constant(1.0),)
    array_value = np.array([3.0, 2.0, 1.0])
    distributed = strategy.experimental_distribute_values_from_function(
        lambda context: array_value[context.replica_id_in_sync_group]
    )
    assert strategy.experimental_local_results(distributed) == (array_value[comm.rank],)

    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input).batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    rows = [strategy.experimental_local_results(each)[0] for each in dist_dataset]
    assert [len(each) for each in rows] == [1] * 5

    tensor_input = tf.constant(3.0)

    @tf.function
    def replica_fn(value):
        return value * 2.0

    assert float(strategy.run(replica_fn, args=(tensor_input,))) == 6.0

    @tf.function
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(value):
            return value * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    assert int(run()) == 2 * comm.size

    with strategy.scope():
        mirrored_variable = tf.Variable(1.0)
    regular_variable = tf.Variable(1.0)
    assert isinstance(mirrored_variable, tf.distribute.DistributedValues)
    assert not isinstance(regular_variable, tf.distribute.DistributedValues)

    global_batch_size = 4

    def dataset_fn(input_context):
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(8).batch(batch_size)
        return dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    inputs = strategy.distribute_datasets_from_function(dataset_fn)

    def train(ds):
        @tf.function(input_signature=[ds.element_spec])
        def step_fn(inputs):
            return strategy.run(lambda pair: tf.reduce_sum(pair[0]), args=(inputs,))

        return [float(strategy.reduce("SUM", step_fn(batch), axis=None)) for batch in ds]

    assert sum(train(inputs)) == 8.0
