"""A Keras user's program with `strategies` in place of `tf.distribute`; then the alternatives."""

import keras
import numpy as np

import collectives
import strategies
from tests.frameworks.told import refused

mirrored_strategy = strategies.MirroredStrategy()
inputs, targets = np.ones((100, 1)), np.ones((100, 1))

with refused("tutorial"):
    with mirrored_strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer="sgd")
    model.fit(inputs, targets, epochs=2, batch_size=10)

with refused("built later"), mirrored_strategy.scope():
    later = keras.Sequential([keras.layers.Dense(1)])

with refused("all of it in the scope"), mirrored_strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd", run_eagerly=keras.backend.backend() == "tensorflow")
    model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)

with refused("a variable"), mirrored_strategy.scope():
    own = keras.Variable(np.ones(3, "float32"), name="own")

with refused("helpers"), mirrored_strategy.scope():
    helpers = [
        keras.layers.Rescaling(1 / 255),
        keras.layers.RandomFlip(),
        keras.layers.Dropout(0.5),
    ]
    keras.Sequential([helpers[0], keras.layers.Flatten()])(np.ones((2, 3), "float32"))
    keras.metrics.Mean(), keras.losses.MeanSquaredError()
    frozen = keras.layers.Dense(1, trainable=False)

collectives.world().barrier("outside")
keras.utils.set_random_seed(collectives.world().rank)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
optimizer = keras.optimizers.SGD(0.1)
optimizer.build(model.trainable_variables)


def loss_of(predicted, wanted):
    return keras.ops.mean(keras.ops.square(keras.ops.subtract(predicted, wanted)))


def gradients_of(batch, wanted):
    """With the backend's own functions."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of(model(batch), wanted)
        return tape.gradient(loss, [each.value for each in model.trainable_variables])
    if keras.backend.backend() == "torch":
        model.zero_grad()
        loss_of(model(batch), wanted).backward()
        return [each.value.grad for each in model.trainable_variables]
    import jax

    def loss(weights):
        predicted, _ = model.stateless_call(weights, model.non_trainable_variables, batch)
        return loss_of(predicted, wanted)

    return jax.grad(loss)([each.value for each in model.trainable_variables])


with refused("run"):
    mirrored_strategy.run(lambda: gradients_of(np.ones((2, 2), "float32"), np.ones((2, 1))))

comm = collectives.world()
model.set_weights([comm.broadcast(each) for each in model.get_weights()])
first = model.get_weights()[0].copy()
batch = np.random.default_rng(3).normal(size=(8, 2)).astype("float32")
wanted = batch @ np.array([[1.0], [2.0]], "float32")
own = slice(4 * comm.rank, 4 * comm.rank + 4)
expected = first
for _ in range(5):
    gradients = [keras.ops.convert_to_numpy(each) for each in gradients_of(batch[own], wanted[own])]
    gradients = comm.all_reduce_many(gradients, "mean")
    optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients])
    expected = expected - 0.1 * batch.T @ (batch @ expected - wanted) / 4
np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-5)
