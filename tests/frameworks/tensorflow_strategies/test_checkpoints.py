"""`tf.train.Checkpoint`: one writer; restored in any world, and without a strategy."""

import os
import signal

import numpy as np
import pytest

import collectives

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.timeout_seconds(300)]


def test_a_checkpoint(tf, ds, strategy, comm, folder):
    def made(value):
        return {
            "weights": tf.Variable([value, value]),
            "count": tf.Variable(
                0.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            ),
        }

    with strategy.scope():
        state = made(1.0)
        checkpoint = tf.train.Checkpoint(**state)
    strategy.run(lambda: state["count"].assign(comm.rank + 1.0))
    total = comm.size * (comm.size + 1) / 2
    path = checkpoint.save(str(folder / "state"))
    assert path == tf.train.latest_checkpoint(str(folder)) == str(folder / "state-1")
    assert sorted(each.name for each in folder.iterdir()) == [
        "checkpoint",
        "state-1.data-00000-of-00001",
        "state-1.index",
    ]
    with strategy.scope():
        other = made(0.0)
        tf.train.Checkpoint(**other).restore(path).assert_consumed()
    np.testing.assert_array_equal(other["weights"], [1.0, 1.0])
    assert float(other["count"].numpy()) == total
    assert float(strategy.run(other["count"].read_value)) == total / comm.size
    plain = {"weights": tf.Variable([0.0, 0.0]), "count": tf.Variable(0.0)}
    tf.train.Checkpoint(**plain).restore(path).assert_consumed()
    assert float(plain["count"]) == total
    alone = tf.train.Checkpoint(**plain).write(str(folder / f"of{comm.rank}"))
    comm.barrier()
    with strategy.scope():
        third = made(0.0)
        tf.train.Checkpoint(**third).read(alone).assert_existing_objects_matched()
    assert float(third["count"].numpy()) == total
    # Written at once, not by a thread of TensorFlow's, beside an object of the program's own.
    written, own = [], tf.Module()
    own._value = tf.Variable(1.0)
    options = tf.train.CheckpointOptions(
        enable_async=True,
        experimental_write_callbacks=[lambda: written.append(""), written.append],
    )
    tf.train.Checkpoint(own=own).write(str(folder / f"own{comm.rank}"))
    path = tf.train.Checkpoint(own=own, **third).save(str(folder / "late"), options)
    assert written == ["", path]
    assert tf.train.load_checkpoint(path).has_tensor("count/.ATTRIBUTES/VARIABLE_VALUE")


def test_a_manager(tf, strategy, comm, folder):
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
        optimizer = tf.keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
    for number in range(1, 5):
        assert manager.save() == str(folder / f"ckpt-{number}")
    kept = [str(folder / f"ckpt-{number}") for number in (3, 4)]
    assert manager.checkpoints == kept
    assert manager.latest_checkpoint == kept[1]
    comm.barrier()
    assert sorted(each.name for each in folder.glob("*.index")) == ["ckpt-3.index", "ckpt-4.index"]
    weights = model.get_weights()
    model.set_weights([each + 1 for each in weights])
    fresh = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
    assert fresh.restore_or_initialize() == kept[1]
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])


def test_a_chief_that_cannot_write(tf, strategy, comm, folder):
    with strategy.scope():
        checkpoint = tf.train.Checkpoint(weights=tf.Variable(1.0))
    (folder / "file").write_text("") if comm.rank == 0 else None
    comm.barrier()
    with pytest.raises((tf.errors.OpError, RuntimeError), match=r"file|writing a checkpoint"):
        checkpoint.save(str(folder / "file" / "state"))
    assert checkpoint.save(str(folder / "state")).startswith(str(folder))


def test_what_communicates_is_not_in_a_saved_model(tf, strategy, comm, folder):
    class Counting(tf.Module):
        def __init__(self):
            modes = tf.VariableSynchronization, tf.VariableAggregation
            with strategy.scope():
                self.first, self.total = (
                    tf.Variable(1.0, synchronization=modes[0].ON_READ, aggregation=each)
                    for each in (modes[1].ONLY_FIRST_REPLICA, modes[1].SUM)
                )

        @tf.function(input_signature=[])
        def read(self):
            return self.first.value() + self.total

    module = Counting()
    strategy.run(lambda: module.total.assign(comm.rank + 2.0))
    tf.saved_model.save(module, str(folder / "saved"), signatures=module.read)
    total = 1.0 + sum(rank + 2.0 for rank in range(comm.size))
    assert float(tf.saved_model.load(str(folder / "saved")).read()) == total

    def step():
        return strategy.reduce("SUM", tf.constant(1.0), axis=None)

    for signature in (
        tf.function(module.first.value).get_concrete_function(),
        tf.function(step).get_concrete_function(),
        tf.function(step, input_signature=[]),
    ):
        with pytest.raises(ValueError, match="can't be part of a SavedModel"):
            tf.saved_model.save(module, str(folder / "step"), signatures=signature)


# Of Keras, which reads every distributed variable of TensorFlow in this way when it saves.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")
def test_models_have_one_writer(tf, strategy, comm, folder):
    with strategy.scope():
        layers = [tf.keras.layers.Input((20,)), tf.keras.layers.Dense(400)]
        model = tf.keras.Sequential(layers)
        model.compile("adam", "mse")
    model.fit(np.ones((2, 20)), np.ones((2, 400)), verbose=0)
    rows = np.full((1, 20), comm.rank + 1.0, np.float32)
    expected = model(rows).numpy()
    for number in range(4):
        model.save(folder / f"{number}.keras")
        model.save_weights(filepath=str(folder / f"{number}.weights.h5"))
        loaded = tf.keras.models.load_model(folder / f"{number}.keras")
        assert loaded.loss == "mse"
        assert loaded.optimizer.iterations == 1
        np.testing.assert_allclose(loaded(rows), expected, rtol=1e-5)
    tf.saved_model.save(model, str(folder / "saved"))
    assert sorted(each.name for each in folder.iterdir()) == sorted(
        ["saved", *(f"{n}{end}" for n in range(4) for end in (".keras", ".weights.h5"))]
    )
    with pytest.raises(Exception, match=r"filepath|missing"):
        model.save(folder / "missing" / "model.keras")
    with pytest.raises(collectives.MismatchError, match=r"Model\.save: all ranks call it"):
        model.save(folder / "own.keras") if comm.rank == 0 else strategy.communicator.barrier()
    checkpoint = tf.train.Checkpoint(model=model)
    with pytest.raises(collectives.MismatchError, match=r"Checkpoint\.save.*all ranks call it"):
        checkpoint.save(str(folder / "own")) if comm.rank == 0 else strategy.communicator.barrier()


def test_a_signal_to_one_rank_saves_on_all(tf, ds, strategy, comm, folder):
    """As NumPy's handler, but of TensorFlow's checkpoints, numbered by the calls."""
    made = ds.experimental.PreemptionCheckpointHandler
    with strategy.scope():
        number = tf.Variable(0.0)
    checkpoint = tf.train.Checkpoint(number=number)

    def step(told):
        number.assign_add(1.0)
        if told:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(ValueError, match="must be given outside of a strategy's scope"):
        made(None, checkpoint, str(folder))
    with strategy.scope(), made(None, checkpoint, str(folder)) as handler:
        handler.run(step, told=False)
        with pytest.raises(SystemExit) as ended:
            handler.run(step, told=comm.rank == 1)
    assert ended.value.code == 42
    number.assign(0.0)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=1)
    with made(None, manager, communicator=strategy.communicator) as handler:
        assert (float(number), handler.total_run_calls) == (2.0, 2)
