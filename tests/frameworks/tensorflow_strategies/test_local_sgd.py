"""LocalSGDStrategy on TensorFlow's variables."""

import functools
import operator

import numpy as np
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.timeout_seconds(300)]


@pytest.mark.parametrize("traced", ["not", "around run", "within run", "in a method"])
def test_rounds(tf, ds, comm, traced):
    strategy = ds.LocalSGDStrategy(2, communicator=comm)
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        weights = tf.keras.Variable(np.zeros(2, np.float32))
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build([weights])

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
