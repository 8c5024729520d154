"""The strategies' arguments, as those of `tf.distribute`."""

import json

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.timeout_seconds(300)]


def test_each_strategy_trains(tf, ds, comm):
    experimental, size = tf.distribute.experimental, comm.size
    made = [
        ds.MirroredStrategy(communicator=comm),
        ds.MirroredStrategy(["/cpu:0"] * size, communicator=comm),
        ds.MirroredStrategy(
            cross_device_ops=tf.distribute.HierarchicalCopyAllReduce(), communicator=comm
        ),
        ds.MirroredStrategy(
            cross_device_ops=tf.distribute.ReductionToOneDevice(), communicator=comm
        ),
        ds.MirroredStrategy(cross_device_ops=tf.distribute.NcclAllReduce(), communicator=comm),
        ds.CentralStorageStrategy(communicator=comm),
        ds.experimental.CentralStorageStrategy(communicator=comm),
        ds.MultiWorkerMirroredStrategy(
            communication_options=experimental.CommunicationOptions(
                implementation=experimental.CommunicationImplementation.RING
            ),
            communicator=comm,
        ),
        ds.experimental.MultiWorkerMirroredStrategy(
            experimental.CollectiveCommunication.RING, communicator=comm
        ),
    ]
    for strategy in made:
        assert isinstance(strategy, tf.distribute.Strategy)
        assert strategy.num_replicas_in_sync == size
        with strategy.scope():
            weights = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
        tf.function(
            lambda weights=weights, strategy=strategy: strategy.run(weights.assign, (2.0,))
        )()
        assert float(weights.numpy()) == 2.0 * size
    alone = ds.OneDeviceStrategy("/cpu:0")
    assert alone.num_replicas_in_sync == 1
    assert float(alone.reduce("SUM", alone.run(lambda: tf.constant(3.0)), axis=None)) == 3.0
    # XLA compiles no collective.
    mean = tf.function(lambda x: alone.reduce("MEAN", x, axis=0), jit_compile=True)
    assert float(mean(tf.constant([1.0, 2.0]))) == 1.5
    with alone.scope():
        weights = tf.Variable([1.0], synchronization=tf.VariableSynchronization.ON_READ)
    alone.run(lambda: weights.assign_add([1.0]))
    assert type(weights) is type(tf.Variable(1.0))
    assert weights.numpy() == [2.0]


def test_the_cluster(tf, ds, comm, monkeypatch):
    """Ranks are numbered by their tasks, whatever the order in which they were started."""
    index = comm.size - 1 - comm.rank
    cluster = {"worker": [f"host{each}" for each in range(comm.size)]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    for resolver in (None, tf.distribute.cluster_resolver.TFConfigClusterResolver()):
        strategy = ds.MultiWorkerMirroredStrategy(resolver, communicator=comm)
        context = strategy.run(tf.distribute.get_replica_context)
        assert int(context.replica_id_in_sync_group) == index
        assert strategy.cluster_resolver.task_id == index
        assert strategy.is_chief == (index == 0)
        with strategy.scope():
            variable = tf.Variable(float(comm.rank))
        assert float(variable.numpy()) == comm.size - 1
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
    with pytest.raises(ValueError, match="TF_CONFIG"):
        ds.MultiWorkerMirroredStrategy(communicator=comm)
    with pytest.raises(TypeError, match="cluster_resolver is a int"):
        ds.MultiWorkerMirroredStrategy(3, communicator=comm)
