"""What users do with TPUStrategy, on 4 devices of the CPU in one process or in two."""

import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives.jax
import strategies
from strategies.cluster_resolver import TPUClusterResolver
from strategies.jax import REPLICA, DeviceAssignment, initialize_tpu_system

DEVICES = 4


def raises(kind, text, function, *args, **kwargs):
    with pytest.raises(kind, match=re.escape(text)):
        function(*args, **kwargs)


def test_starting(resolver):
    """A second initialization invalidates nothing; every rank is a worker."""
    before = jnp.arange(3) + resolver.task_id
    topology = initialize_tpu_system(resolver)
    assert before.tolist() == [resolver.task_id + each for each in range(3)]
    size = resolver.communicator.size
    assert topology == (size, DEVICES // size)
    assert resolver.cluster_spec().num_tasks("worker") == size
    assert len(jax.devices()) == DEVICES
    raises(ValueError, "start a rank on each host", TPUClusterResolver, "grpc://10.0.0.2:8470")
    raises(TypeError, "must be a TPUClusterResolver", strategies.TPUStrategy, "resolver")
    for wrong in (DeviceAssignment(3, 1), DeviceAssignment(-2, -2)):
        raises(ValueError, "must use all 4 devices", strategies.TPUStrategy, resolver, wrong)
    assert DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=2) == (2, 2)
    raises(ValueError, "must use all 4", DeviceAssignment.build, topology, [1, 1, 1, 2])
    if size > 1:
        over = DeviceAssignment(1, 4)
        raises(ValueError, "devices of each process", strategies.TPUStrategy, resolver, over)


def test_calls_in_programs_over_several_devices(resolver):
    """XLA would fail with an internal error."""
    if resolver.communicator.size == DEVICES:
        return
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("own",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.device_put(jnp.ones(4), spread)
    over_mesh = jax.shard_map(
        collectives.jax.all_reduce, mesh=mesh, in_specs=spread.spec, out_specs=spread.spec
    )
    call = jax.jit(collectives.jax.all_reduce)
    for program, given in (
        (call, array),
        (jax.jit(over_mesh), array),
        (jax.pmap(collectives.jax.all_reduce), jnp.ones((len(mesh.devices), 4))),
    ):
        raises(NotImplementedError, "devices of this process: must be over one", program, given)


def test_a_function_that_fails_on_one_rank(resolver):
    """Before XLA waits for that rank, also where it is traced anew."""
    strategy = strategies.TPUStrategy(resolver)
    last = strategy.communicator.rank == strategy.communicator.size - 1

    def step(array, fails):
        if last and fails:
            raise KeyError("missing")
        return array + 1

    for length in (2, 3):
        array = strategy.replicate(jnp.ones(length))
        strategy.run(partial(step, fails=False), (array,))
        with pytest.raises((KeyError, collectives.MismatchError), match="missing"):
            strategy.run(partial(step, fails=True), (array,))
    values = [1.0, object() if last else 1.0]
    with pytest.raises((TypeError, collectives.MismatchError), match=r"JAX type|object"):
        strategy.replicate(values)


def test_training(resolver):
    """Linear regression on 4 replicas has NumPy's parameters on one."""
    strategy = strategies.TPUStrategy(resolver)
    assert strategy.num_replicas_in_sync == DEVICES
    data = np.random.default_rng(0).normal(size=(3, 8, 2))
    kernel = np.array([[1.0], [-2.0]])
    parameters = strategy.replicate({"kernel": kernel + strategy.communicator.rank})

    def loss(parameters, rows):
        return ((rows @ parameters["kernel"] - 1) ** 2).sum()

    def step(parameters, rows):
        context = strategies.get_replica_context()
        assert (context.num_replicas_in_sync, rows.shape) == (DEVICES, (2, 2))
        value, gradients = jax.value_and_grad(loss)(parameters, rows)
        total = context.all_reduce("sum", gradients)
        return value, jax.tree.map(lambda p, g: p - 0.02 * g, parameters, total)

    with strategy.scope():
        batches = strategy.experimental_distribute_dataset(data)
        for rows, whole in zip(batches, data, strict=True):
            losses, parameters = strategy.run(step, (parameters, rows))
            given = strategy.reduce(strategies.ReduceOp.SUM, losses, axis=None)
            error = whole @ kernel - 1
            np.testing.assert_allclose(given, (error**2).sum(), rtol=1e-4)
            kernel = kernel - 0.04 * whole.T @ error
    own = strategy.experimental_local_results(parameters["kernel"])
    assert len(own) == DEVICES // strategy.communicator.size
    for each in own:
        np.testing.assert_allclose(each, kernel, rtol=1e-4)


def test_values_of_replicas(resolver):
    """Each replica's number, reductions with and without an axis, and what contexts refuse."""
    strategy = strategies.TPUStrategy(resolver)
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: np.arange(3) + 10 * context.replica_id_in_sync_group
    )
    rank, local = strategy.communicator.rank, DEVICES // strategy.communicator.size
    first = rank * local
    rows = [(np.arange(3) + 10 * (first + each)).tolist() for each in range(local)]
    assert [each.tolist() for each in strategy.experimental_local_results(ids)] == rows
    assert strategy.experimental_local_results(5) == (5,)
    assert strategy.reduce("sum", ids, axis=None).tolist() == [60, 64, 68]
    assert strategy.reduce("mean", {"ids": ids}, axis=0)["ids"] == 16
    assert strategy.reduce("sum", 2.0, axis=None) == 2.0 * DEVICES
    assert strategy.gather(ids, axis=0).tolist() == [
        value + 10 * each for each in range(DEVICES) for value in range(3)
    ]

    def program(own, scale):
        context = strategies.get_replica_context()
        number = context.replica_id_in_sync_group
        gathered = context.all_gather(own[:1], axis=0)
        assert number.aval.shape == ()
        raises(RuntimeError, "requires a cross-replica context", strategy.run, lambda: 0)
        raises(NotImplementedError, "merge_call", context.merge_call, print)
        assert strategies.get_strategy() is strategy
        return number * scale, gathered, jax.lax.pmax(own, REPLICA)

    numbers, gathered, highest = strategy.run(program, (ids,), {"scale": 3})
    own = [int(each) for each in strategy.experimental_local_results(numbers)]
    assert own == [3 * (first + each) for each in range(local)]
    for each in strategy.experimental_local_results(gathered):
        assert each.tolist() == [0, 10, 20, 30]
    assert strategy.experimental_local_results(highest)[0].tolist() == [30, 31, 32]
    raises(ValueError, "must be a tuple or list", strategy.run, program, ids)
    raises(TypeError, "must be None, an int or a tuple", strategy.reduce, "sum", ids, [0])
    batches = strategy.experimental_distribute_dataset([np.ones((6, 1))])
    raises(ValueError, "must divide by the 4 replicas", next, iter(batches))
    twice = strategy.experimental_distribute_dataset([np.ones((4, 1)), np.ones((8, 1))])
    assert [len(list(twice)), len(list(twice))] == [2, 2]
    with strategy.scope():
        raises(NotImplementedError, "under TPUStrategy use", strategies.Variable, np.ones(2))


def test_logical_devices(resolver):
    """Two replicas of two logical devices each: shardings outside of run, and inside."""
    strategy = strategies.TPUStrategy(resolver, DeviceAssignment(2, 2))
    columns = strategy.mesh.devices
    assert columns.shape == (2, 2)
    kernel = np.arange(12.0).reshape(4, 3)
    assigned = strategy.experimental_assign_to_logical_device(kernel, 1)
    assert assigned.sharding.device_set == set(columns[:, 1])
    for wrong in (-1, 2):
        text = "must be from 0 to 1"
        raises(ValueError, text, strategy.experimental_assign_to_logical_device, kernel, wrong)
    whole = strategy.experimental_replicate_to_logical_devices(kernel)
    assert whole.sharding.device_set == set(columns.flat)
    halves = strategy.experimental_split_to_logical_devices(kernel, [2, 1])
    for array, shape in ((assigned, (4, 3)), (whole, (4, 3)), (halves, (2, 3))):
        for shard in array.addressable_shards:
            assert shard.data.shape == shape
            np.testing.assert_array_equal(shard.data, kernel[shard.index])
    split = strategy.experimental_split_to_logical_devices
    for dimensions, text in (
        ([2], "one number for each axis"),
        ([1, 2], "must divide the axes"),
        ([2, 2], "must have the product 2"),
        ([4, 1], "must have the product 2"),
        ([-2, -1], "must have the product 2"),
    ):
        raises(ValueError, text, split, kernel, dimensions)

    def program(rows, kernel):
        kernel = split(kernel, [2, 1])
        hidden = strategy.experimental_replicate_to_logical_devices(rows @ kernel)
        assign = strategy.experimental_assign_to_logical_device
        raises(ValueError, "can't keep an array on one", assign, hidden, 0)
        return kernel, strategies.get_replica_context().all_reduce("mean", hidden)

    rows = np.arange(8.0).reshape(2, 4)
    (batch,) = strategy.experimental_distribute_dataset([rows])
    for given in (kernel, halves, whole, assigned):
        kernels, hidden = strategy.run(program, (batch, given))
        mean = (rows @ kernel).mean(0, keepdims=True)
        for each in strategy.experimental_local_results(hidden):
            np.testing.assert_allclose(each, mean)
        assert {each.data.shape for each in kernels.stacked.addressable_shards} == {(1, 2, 3)}
        np.testing.assert_array_equal(strategy.experimental_local_results(kernels)[0], kernel)


def test_many_steps(resolver):
    """Steps that nothing waits for: XLA's threads would deadlock with several in flight."""
    strategy = strategies.TPUStrategy(resolver)

    def step(row):
        return strategies.get_replica_context().all_reduce("mean", row) + 1

    def replica_number(context):
        return np.full(3, context.replica_id_in_sync_group, "float32")

    rows = strategy.experimental_distribute_values_from_function(replica_number)
    stepping = partial(step)  # its `repr` has an address, another one on each rank
    for _ in range(500):
        rows = strategy.run(stepping, (rows,))
    for row in strategy.experimental_local_results(rows):
        np.testing.assert_array_equal(row, np.full(3, (DEVICES - 1) / 2 + 500))


def test_repeated_calls_compile_nothing(resolver):
    strategy = strategies.TPUStrategy(resolver)
    ids = strategy.run(lambda: jnp.ones((2, 3)))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event)
    )
    for repeated in (False, True):
        compiled.clear()
        for op, axis in (("sum", None), ("mean", 0), ("sum", (0, 1))):
            strategy.reduce(op, ids, axis=axis)
        strategy.gather(ids, axis=1)
        strategy.experimental_local_results(ids)
        assert any("compile" in event for event in compiled) is not repeated, compiled


def test_differences(resolver):
    """Ranks that call different things all raise, and the next call works."""
    strategy, rank = strategies.TPUStrategy(resolver), resolver.task_id
    mismatch = collectives.MismatchError
    assignment = (None, DeviceAssignment(2, 2))[rank]
    raises(mismatch, "num_cores", strategies.TPUStrategy, resolver, assignment)
    function = (jnp.sin, jnp.cos)[rank]
    raises(mismatch, "TPUStrategy.run", strategy.run, function, (1.0,))
    raises(mismatch, "TPUStrategy.reduce", strategy.reduce, ("sum", "mean")[rank], 1.0, axis=None)
    raises(mismatch, "of contents", strategy.run, lambda x: x, (np.ones(2) + rank,))
    raises(mismatch, "replicate", strategy.replicate, np.ones(1 + rank))
    short = strategy.experimental_distribute_dataset([np.ones((5, 1))])
    raises(ValueError, "a batch of 5 rows", next, iter(short))
    assert strategy.reduce("sum", 1.0, axis=None) == DEVICES


def main():
    resolver = TPUClusterResolver()
    initialize_tpu_system(resolver)
    test_starting(resolver)
    test_a_function_that_fails_on_one_rank(resolver)
    test_training(resolver)
    test_values_of_replicas(resolver)
    test_many_steps(resolver)
    test_repeated_calls_compile_nothing(resolver)
    if resolver.communicator.size < DEVICES:
        test_logical_devices(resolver)
    if resolver.communicator.size > 1:
        test_differences(resolver)
    sys.stdout.write(f"rank {resolver.task_id} has ended\n")


if __name__ == "__main__":
    main()
