"""`clipnorm` and `global_clipnorm` equal Keras' step in one process with the whole batch."""

import numpy as np
import pytest

from strategies import Variable, optimizers
from tests.strategies.support import on_ranks


def gradients_of(rank):
    return [np.array([3, 4], np.float32) * (rank + 1), np.array([-12 * rank], np.float32)]


@pytest.mark.parametrize("limits", [{"clipnorm": 2.0}, {"global_clipnorm": 2.0}], ids=str)
def test_steps_are_those_of_keras_in_one_process(keras, limits):
    variables = [keras.Variable(np.zeros(size, np.float32)) for size in (2, 1)]
    whole = [sum(parts) for parts in zip(*map(gradients_of, range(2)), strict=True)]
    optimizer = keras.optimizers.SGD(1.0, **limits)
    optimizer.apply([keras.ops.convert_to_tensor(each) for each in whole], variables)

    def stepped(strategy):
        with strategy.scope():
            own = [Variable(np.zeros(size, np.float32)) for size in (2, 1)]
        rank = strategy.communicator.rank
        pairs = list(zip(gradients_of(rank), own, strict=True))
        strategy.run(optimizers.SGD(1.0, **limits).apply_gradients, [pairs])
        return [each.numpy() for each in own]

    for replica in on_ranks(2, stepped):
        for own, keras_own in zip(replica, variables, strict=True):
            np.testing.assert_allclose(own, keras_own.numpy(), rtol=1e-6)
