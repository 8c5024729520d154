"""TensorFlow's tutorial of custom training, `strategies` in place of `tf.distribute`.

Then the alternatives that the error names.
"""

import numpy as np
import tensorflow as tf

import collectives
import strategies
from tests.frameworks.told import refused

strategy = strategies.MirroredStrategy()

BATCH_SIZE_PER_REPLICA = 16
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

train_images = np.random.default_rng(0).normal(size=(64, 8, 8, 1)).astype("float32")
train_labels = np.arange(64) % 10
train_dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
train_dataset = train_dataset.batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)


def create_model():
    regularizer = tf.keras.regularizers.L2(1e-5)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss


with strategy.scope():
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")


with refused("scope"), strategy.scope():
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


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(strategies.ReduceOp.SUM, per_replica_losses, axis=None)


with refused("run"):
    for x in train_dist_dataset:
        strategy.run(train_step, args=(x,))

with refused("run of a tf.function"):
    strategy.run(tf.function(train_step), args=(next(iter(train_dist_dataset)),))

with refused("run in a tf.function"):
    distributed_train_step(next(iter(train_dist_dataset)))

with refused("fit of a traced function"), strategy.scope():
    traced = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    traced.compile(loss="mse", optimizer="sgd")
    traced.fit(np.ones((100, 1)), np.ones((100, 1)), epochs=1000, verbose=0)

comm = collectives.world()
weights = tf.Variable([[1.0 + comm.rank], [0.0]])

with refused("assignment in run"):
    strategy.run(lambda: weights.assign_sub([[1.0], [1.0]]))

weights.assign(comm.broadcast(weights.numpy()))
batch = np.random.default_rng(3).normal(size=(8, 2)).astype("float32")
wanted = batch @ np.array([[1.0], [2.0]], "float32")
own = slice(4 * comm.rank, 4 * comm.rank + 4)
expected = weights.numpy()
for _ in range(5):
    with tf.GradientTape() as tape:
        error = batch[own] @ weights - wanted[own]
        loss = tf.reduce_mean(error**2)
    gradients = tape.gradient(loss, [weights])
    (total,) = comm.all_reduce_many([each.numpy() for each in gradients], "mean")
    weights.assign_sub(0.1 * total)
    expected = expected - 0.1 * batch.T @ (batch @ expected - wanted) / 4
np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5)
