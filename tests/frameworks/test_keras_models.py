"""Which objects of Keras and TensorFlow train, and which are refused."""

import numpy as np
import pytest

from strategies import Checkpoint, Variable, optimizers
from strategies.foreign.keras_models import Keras
from tests.strategies.support import refusal


def functional(keras):
    entered = keras.Input((2,))
    return keras.Model(entered, keras.layers.Dense(1)(entered))


def subclassed(keras):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

    return Net()


def own_layer(keras):
    class Linear(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], 1))

    return Linear()


TRAIN = {
    "built": lambda keras: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
    "built later": lambda keras: keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)]),
    "functional": functional,
    "subclassed": subclassed,
    "a layer": lambda keras: keras.layers.Dense(1),
    "a layer of one's own": own_layer,
    "recurrent": lambda keras: keras.layers.Bidirectional(keras.layers.LSTM(2)),
    "partly frozen": lambda keras: keras.Sequential(
        [keras.layers.Dense(1, trainable=False), keras.layers.PReLU()]
    ),
    "copied": lambda keras: keras.models.clone_model(functional(keras)),
}


def frozen_later(keras):
    model = functional(keras)
    model.trainable = False
    return model


def adapted(keras):
    layer = keras.layers.Normalization()
    layer.adapt(np.ones((2, 3), np.float32))
    return layer


DO_NOT = {
    "frozen": lambda keras: keras.layers.Dense(1, trainable=False),
    "frozen later": frozen_later,
    "rescaling": lambda keras: keras.layers.Rescaling(1 / 255),
    "chance": lambda keras: keras.Sequential(
        [keras.layers.RandomFlip(), keras.layers.Dropout(0.5), keras.layers.RandAugment()]
    ),
    "adapted": adapted,
    "merging": lambda keras: keras.layers.Add(),
    "shapes": lambda keras: keras.Sequential(
        [keras.layers.MaxPooling2D(), keras.layers.Flatten(), keras.layers.ReLU()]
    ),
    "a metric": lambda keras: keras.metrics.SparseCategoricalAccuracy(),
    "a loss": lambda keras: keras.losses.MeanSquaredError(),
    "a counter": lambda keras: keras.Variable(0, dtype="int32", trainable=False),
}


@pytest.mark.parametrize("what", TRAIN)
def test_what_trains(keras, strategy, what):
    def in_scope():
        with strategy.scope():
            made.append(TRAIN[what](keras))

    made = []
    refusal(TypeError, "^the Keras (model|layer) .* was created in the scope of", in_scope)
    match = "^the Keras (model|layer) .* is used in run of"
    refusal(TypeError, match, strategy.run, lambda: made)
    refusal(TypeError, "^model is the Keras", Checkpoint, model=made[0])


@pytest.mark.parametrize("what", DO_NOT)
def test_what_does_not_train(keras, strategy, what):
    with strategy.scope():
        made = DO_NOT[what](keras)
        Checkpoint(step=Variable(1), models=[made])
    strategy.run(lambda: made)


def test_every_layer_of_keras_that_gets_weights_is_recognized(keras):
    """Compared with the source of `build`, if it adds weights."""
    import inspect

    known = Keras()
    unknown = []
    for name, kind in vars(keras.layers).items():
        if not (inspect.isclass(kind) and issubclass(kind, keras.layers.Layer)):
            continue
        builds = next(each for each in kind.__mro__ if "build" in vars(each))
        adds = "add_weight" in inspect.getsource(vars(builds)["build"])
        if adds and "preprocessing" not in kind.__module__ and not known._builds_weights(kind):
            unknown.append(name)
    assert unknown == []


def test_an_optimizer_that_was_made_outside(keras, strategy):
    optimizer = keras.optimizers.SGD(1.0)
    refusal(TypeError, "^the Keras optimizer SGD is used", strategy.run, lambda: optimizer)
    with strategy.scope():
        match = "^the Keras optimizer SGD would change variables inside the scope of"
        refusal(TypeError, match, optimizer.apply, [np.ones(2)], [None])


def test_keras_is_as_it_was_outside(keras, strategy):
    kinds = keras.layers.Layer, keras.Variable, keras.optimizers.Optimizer

    def methods():
        return [dict(vars(each)) for kind in kinds for each in kind.__mro__]

    before = methods()
    with strategy.scope():
        assert methods() != before
        strategy.run(lambda: None)
        refusal(KeyError, "mine", fails, strategy)
    assert methods() == before


def fails(strategy):
    with strategy.scope():
        raise KeyError("mine")


def test_a_temporary_layer_for_initial_values(keras, strategy):
    def initial():
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
        return Variable(np.zeros(layer.kernel.shape))

    with strategy.scope():
        variable = initial()
    assert variable.shape == (3, 2)


def test_a_constructor_that_fails(keras, strategy):
    with strategy.scope():
        refusal(ValueError, "units", keras.layers.Dense, -1)


def test_variables_and_modules_of_tensorflow(tf, strategy):
    class Linear(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(tf.ones(2), name="w")

    def in_scope(make):
        with strategy.scope():
            return make()

    made = "^the TensorFlow Variable 'w:0' of shape {} was created in the scope"
    refusal(TypeError, made.format(r"\(2,\)"), in_scope, Linear)
    refusal(TypeError, made.format(r"\(\)"), in_scope, lambda: tf.Variable(1.0, name="w"))
    for passing in ({"trainable": False}, {"dtype": tf.int64}):
        in_scope(lambda passing=passing: tf.Variable(1, **passing))
    module, variable = Linear(), tf.Variable(1.0)
    refusal(TypeError, "module Linear is used", strategy.run, lambda: module)
    refusal(TypeError, "Variable 'Variable:0'", strategy.run, tf.function(lambda: variable + 1.0))
    pairs = [(np.ones(()), variable)]
    match = "^the TensorFlow Variable 'Variable:0' .* at position 0 of apply_gradients"
    refusal(TypeError, match, optimizers.SGD(1.0).apply_gradients, pairs)
    old = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    with strategy.scope():
        match = "optimizer GradientDescentOptimizer would change"
        refusal(TypeError, match, old.apply_gradients, [(tf.ones(()), variable)])


def test_gradients_of_tensorflow_for_a_strategys_variable(tf, strategy):
    with strategy.scope():
        variable = Variable(np.zeros(3, np.float32))
    pairs = [(tf.constant([0.0, 1.0, 2.0]), variable)]
    strategy.run(lambda: optimizers.SGD(1.0).apply_gradients(pairs))
    np.testing.assert_array_equal(variable, [0, -1, -2])
