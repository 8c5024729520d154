"""The code of the page of `tf.distribute.experimental.ParameterServerStrategy`.

Only the strategy's import is changed. Keras's own example of a step replaces the page's comments.
"""

import json

import numpy as np
import pytest

from tests.frameworks.tensorflow_strategies.served import run_on_workers, together

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(3),
    pytest.mark.timeout_seconds(300),
    pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options"),
]


def files(tf, folder):
    """Records of 24 numbers in four files."""
    names = [str(folder / f"{number}.tfr") for number in range(1, 5)]
    for number, name in enumerate(names):
        with tf.io.TFRecordWriter(name) as writer:
            for value in range(6):
                writer.write(np.float32(number * 6 + value).tobytes())
    return names


def set_tf_config(comm, monkeypatch):
    """The page's cluster."""
    worker = comm.rank < 2
    task = {"type": "worker" if worker else "ps", "index": comm.rank if worker else 0}
    cluster = {"worker": ["localhost:12345", "localhost:23456"], "ps": ["localhost:34567"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    return cluster, task


def test_the_page(tf, ds, comm, tmp_path, monkeypatch):
    cluster, task = set_tf_config(comm, monkeypatch)
    # This implicitly uses TF_CONFIG for the cluster and current task info.
    strategy = ds.experimental.ParameterServerStrategy(communicator=comm)
    assert strategy.cluster_resolver.task_type == task["type"]
    assert strategy.cluster_resolver.cluster_spec().as_dict() == cluster

    def work():
        datasets(tf, strategy, files(tf, tmp_path))
        from_a_function(tf, strategy)
        values(tf, strategy)
        runs(tf, strategy)
        scope(tf, strategy)

    run_on_workers(comm, strategy, work)


def datasets(tf, strategy, names):
    """`experimental_distribute_dataset`, its element_spec, and `experimental_make_numpy_dataset`.

    Each worker has all batches, and its own step on each of them.
    """

    def parse(record):
        return tf.reshape(tf.io.decode_raw(record, tf.float32), [])

    dataset = tf.data.TFRecordDataset(names).map(parse).batch(8)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        total = tf.Variable(0.0)

    def replica_fn(rows):
        total.assign_add(tf.reduce_sum(rows))
        return tf.reduce_sum(rows)

    @tf.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs):
        return replica_fn(inputs)

    for fn in (replica_fn, train_step):
        for x in dist_dataset:
            strategy.run(fn, args=(x,))
    together(strategy)
    assert float(total.numpy()) == 4 * sum(range(24))  # two workers, two functions
    together(strategy)

    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    dataset = dataset.batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    assert [each.shape[0] for each in dist_dataset] == [2] * 5


def from_a_function(tf, strategy):
    """`experimental_distribute_datasets_from_function`: a pipeline for each worker."""
    global_batch_size = 8

    def dataset_fn(input_context):
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = tf.data.Dataset.from_tensors([[1.0]]).repeat(32).batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)

    def train(ds):
        @tf.function(input_signature=[ds.element_spec])
        def step_fn(inputs):
            return inputs

        return [strategy.run(step_fn, args=(batch,)) for batch in ds]

    # Each worker is a replica of its own: 32 rows are 4 batches, of which each has every second.
    assert [tuple(each.shape) for each in train(inputs)] == [(8, 1, 1)] * 2


def values(tf, strategy):
    """`experimental_distribute_values_from_function` and `experimental_local_results`."""

    def value_fn(ctx):
        return tf.constant(1.0)

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert local_result == (tf.constant(1.0),)
    array_value = np.array([3.0, 2.0, 1.0])
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda ctx: array_value[ctx.replica_id_in_sync_group]
    )
    assert strategy.experimental_local_results(distributed_values) == (3.0,)
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda ctx: ctx.num_replicas_in_sync
    )
    assert strategy.experimental_local_results(distributed_values) == (1,)


def runs(tf, strategy):
    """`run` with a constant and with distributed values; `reduce`, which is the worker's own."""
    tensor_input = tf.constant(3.0)

    @tf.function
    def replica_fn(input):
        return input * 2.0

    result = strategy.run(replica_fn, args=(tensor_input,))
    assert float(result) == 6.0
    assert float(strategy.reduce("SUM", result, axis=None)) == 6.0
    steps = strategy.extended.exchange._steps
    before = steps._last
    assert float(strategy.reduce("MEAN", tf.constant([1.0, 2.0]), axis=0)) == 1.5
    assert steps._last == before

    @tf.function
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input):
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    assert int(run()) == 2


def scope(tf, strategy):
    """`scope`: variables are on the servers if they are created in it."""
    with strategy.scope():
        mirrored_variable = tf.Variable(1.0)
    regular_variable = tf.Variable(1.0)
    assert isinstance(mirrored_variable, tf.distribute.DistributedValues)
    assert not isinstance(regular_variable, tf.distribute.DistributedValues)
    together(strategy)
    number = strategy.cluster_resolver.task_id
    strategy.run(lambda: mirrored_variable.assign_add(1.0 + number))
    together(strategy)
    assert float(mirrored_variable.numpy()) == 4.0


def test_the_estimator(tf, ds, comm, tmp_path, monkeypatch):
    """`train_and_evaluate`: the workers' steps count together, the chief evaluates."""
    from strategies import estimator

    folder = comm.broadcast_object(str(tmp_path))
    set_tf_config(comm, monkeypatch)

    def model_fn():
        tf.keras.utils.set_random_seed(4)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.05), "mse")
        return model

    def input_fn(input_context):
        inputs = np.random.default_rng(1).normal(size=(64, 2)).astype(np.float32)
        pairs = inputs, inputs.sum(axis=1, keepdims=True)
        data = tf.data.Dataset.from_tensor_slices(pairs)
        data = data.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return data.repeat().batch(8)

    for max_steps in (40, 60):  # the second time from the first one's checkpoint
        strategy = ds.experimental.ParameterServerStrategy(communicator=comm)
        run_config = estimator.RunConfig(
            folder, train_distribute=strategy, save_checkpoints_steps=15
        )
        regressor = estimator.Estimator(model_fn, config=run_config)

        def train(regressor=regressor, max_steps=max_steps):
            train_spec = estimator.TrainSpec(input_fn, max_steps=max_steps)
            return estimator.train_and_evaluate(
                regressor, train_spec, estimator.EvalSpec(input_fn, steps=8)
            )

        served, *trained = run_on_workers(comm, strategy, train, everywhere=True)[::-1]
        assert served == ({}, [])
        assert trained[0] == trained[1]
        [(metrics, _), _] = trained
        # Each worker may be in a step when the last one is counted.
        assert max_steps <= metrics["global_step"] <= max_steps + 1
        assert metrics["loss"] < 0.1
    if comm.rank == 0:
        latest = tf.train.latest_checkpoint(folder)
        assert latest.endswith(f"-{metrics['global_step']}")
