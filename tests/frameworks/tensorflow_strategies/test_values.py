"""Variables, reductions and contexts, eagerly and in a `tf.function`."""

import numpy as np
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.timeout_seconds(300)]


@pytest.fixture(params=[False, True], ids=["eagerly", "in a function"])
def call(request, tf):
    return tf.function if request.param else lambda fn: fn


def test_reductions(tf, strategy, comm, call):
    size, total = comm.size, sum(range(1, comm.size + 1))
    own = [tf.constant(comm.rank + 1), tf.fill([2], comm.rank + 1.0)]

    @call
    def reduced():
        return (
            strategy.reduce("SUM", own[1], axis=None),
            strategy.reduce("MEAN", own[1], axis=None),
            strategy.reduce("MEAN", own[0], axis=None),
            strategy.gather(own[1], axis=0),
            strategy.reduce("SUM", tf.range(comm.rank + 2), axis=0),
            strategy.reduce("MEAN", tf.range(comm.rank, dtype=tf.float32), axis=0),
            strategy.reduce("MEAN", tf.fill([comm.rank + 1, 2, 3], comm.rank), axis=(0, -1)),
        )

    *results, uneven, empty, pairs = [each.numpy() for each in reduced()]
    np.testing.assert_array_equal(results[0], [total, total])
    np.testing.assert_allclose(results[1], [total / size] * 2)
    assert results[2] == total / size
    assert results[2].dtype == np.float64
    np.testing.assert_array_equal(results[3], np.repeat(np.arange(1, size + 1), 2))
    assert uneven == sum(sum(range(rank + 2)) for rank in range(size))
    values = [value for rank in range(size) for value in range(rank)]
    np.testing.assert_allclose(empty, np.mean(values))
    weighted = sum(rank * (rank + 1) for rank in range(size)) / total
    np.testing.assert_array_equal(pairs, np.full(2, weighted))


def test_results_that_are_kept_stay_as_they_are(tf, strategy, comm, call):
    """Their memory is used again only once nothing holds it, not even a part of it."""

    @call
    def reduced(number):
        own = [tf.fill([2000], number), tf.fill([30, 50], 2 * number), number]
        return strategy.extended.batch_reduce_to("SUM", [(each, each) for each in own])

    kept = []
    for turn in range(12):
        found = reduced(tf.constant(turn + comm.rank, tf.float32))
        # Every other step's results are dropped at once, or but for one of them.
        kept.append((turn, {0: found, 1: found[1:2], 2: []}[turn % 3]))
    for turn, found in kept:
        total = sum(turn + rank for rank in range(comm.size))
        for each in found:
            expected = 2 * total if each.shape == [30, 50] else total
            np.testing.assert_array_equal(each, np.full(each.shape, expected))


def test_memory_for_results_is_used_again_and_aligned(tf):
    from strategies.tensorflow.result_memory import ALIGNMENT, LEAST_BYTES, ResultMemory

    memory = ResultMemory()
    like = [np.zeros((30, 50), "float32"), np.zeros((), "int8"), np.zeros((0, 2)), np.zeros(1000)]
    addresses = set()
    for _ in range(5):
        made = memory.like(like)
        assert [(each.shape, each.dtype) for each in made] == [
            (each.shape, each.dtype) for each in like
        ]
        for number, each in enumerate(made):
            each[...] = number
            assert each.nbytes < LEAST_BYTES or each.ctypes.data % ALIGNMENT == 0
        assert [each.max(initial=number) for number, each in enumerate(made)] == [0, 1, 2, 3]
        addresses.add((made[0].ctypes.data, made[3].ctypes.data))
        del made, each
    ((first, last),) = addresses
    kept = memory.like(like)[3][-1:]
    again = memory.like(like)
    assert again[0].ctypes.data == first
    assert again[3].ctypes.data != last
    assert kept.ctypes.data == last + 8 * 999


def test_a_replicas_context(tf, strategy, comm, call):
    def replica():
        context = tf.distribute.get_replica_context()
        rank = context.replica_id_in_sync_group
        assert context.num_replicas_in_sync == comm.size
        value = tf.cast(rank, tf.float32) + 1.0
        gathered = context.all_gather(tf.fill([rank + 1], value), axis=0)
        merged = context.merge_call(
            lambda merging, given: merging.reduce("MEAN", given, axis=None), args=(value,)
        )
        with tf.GradientTape() as tape:
            tape.watch(value)
            summed = context.all_reduce("SUM", [value * value])[0]
        return rank, gathered, merged, summed, tape.gradient(summed, value)

    rank, gathered, merged, summed, gradient = call(lambda: strategy.run(replica))()
    squares = sum((each + 1) ** 2 for each in range(comm.size))
    assert int(rank) == comm.rank
    np.testing.assert_array_equal(
        gathered, [each + 1 for each in range(comm.size) for _ in range(each + 1)]
    )
    assert float(merged) == (comm.size + 1) / 2
    assert float(summed) == squares
    assert float(gradient) == 2 * (comm.rank + 1) * comm.size


def test_slices_are_concatenated(tf, strategy, comm, call):
    rows = tf.fill([comm.rank + 1, 2], comm.rank + 1.0)
    slices = tf.IndexedSlices(rows, tf.range(comm.rank + 1), tf.constant([4, 2]))

    def replica():
        context = tf.distribute.get_replica_context()
        dense, sparse = context.all_reduce("MEAN", [tf.ones(3) * comm.rank, slices])
        return dense, sparse.values, sparse.indices

    dense, values, indices = call(lambda: strategy.run(replica))()
    np.testing.assert_allclose(dense, np.full(3, (comm.size - 1) / 2))
    ranks = range(comm.size)
    expected = [(each + 1) / comm.size for each in ranks for _ in range(each + 1)]
    np.testing.assert_allclose(values[:, 1], expected, rtol=1e-6)
    np.testing.assert_array_equal(indices, [row for each in ranks for row in range(each + 1)])


def test_values_for_each_replica(tf, strategy, comm):
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(
            [context.replica_id_in_sync_group, context.num_replicas_in_sync]
        )
    )
    assert isinstance(values, tf.distribute.DistributedValues)
    (local,) = strategy.experimental_local_results(values)
    np.testing.assert_array_equal(local, [comm.rank, comm.size])
    doubled = strategy.run(lambda each: each * 2, args=(values,))
    np.testing.assert_array_equal(doubled, [2 * comm.rank, 2 * comm.size])


def test_variables_start_with_the_chiefs_value(tf, strategy, comm):
    with strategy.scope():
        eager = tf.Variable(tf.fill([2], comm.rank + 5.0))
        late = tf.Variable(lambda: comm.rank + 7)
    assert isinstance(eager, tf.distribute.DistributedValues)
    np.testing.assert_array_equal(eager, [5.0, 5.0])
    assert int(late.numpy()) == 7
    created = []

    @tf.function
    def in_function():
        with strategy.scope():
            if not created:
                created.append(tf.Variable(tf.fill([2], comm.rank + 3.0)))
                created.append(tf.Variable(lambda: tf.random.normal([3])))
        return created[0] + 1.0

    np.testing.assert_array_equal(in_function(), [4.0, 4.0])
    np.testing.assert_array_equal(in_function(), [4.0, 4.0])
    gathered = strategy.gather(created[1].read_value()[None], axis=0).numpy()
    assert (gathered == gathered[0]).all()


def test_an_assignment_in_run_follows_the_aggregation(tf, strategy, comm, call):
    modes = tf.VariableAggregation
    own = tf.constant(comm.rank + 1.0)
    with strategy.scope():
        made = {
            mode: tf.Variable(0.0, aggregation=mode)
            for mode in (modes.SUM, modes.MEAN, modes.ONLY_FIRST_REPLICA)
        }
        plain = tf.Variable(0.0, name="plain")
        counter = tf.Variable(0, dtype=tf.int64, aggregation=modes.ONLY_FIRST_REPLICA)
        rows = tf.Variable([0.0, 0.0, 0.0], aggregation=modes.ONLY_FIRST_REPLICA)

    def replica():
        for variable in made.values():
            variable.assign(own)
            variable.assign_add(own)
        counter.assign_add(2)
        # The first rank's one row; the others have more.
        indices = tf.constant([1, 0][: comm.rank + 1])
        rows.scatter_update(tf.IndexedSlices(tf.fill(indices.shape, own), indices))

    call(lambda: strategy.run(replica))()
    total = comm.size * (comm.size + 1) / 2
    found = {mode: float(variable.numpy()) for mode, variable in made.items()}
    assert found == pytest.approx(
        {modes.SUM: 2 * total, modes.MEAN: 2 * total / comm.size, modes.ONLY_FIRST_REPLICA: 2.0}
    )
    assert (int(counter), np.asarray(rows).tolist()) == (2, [0.0, 1.0, 0.0])
    plain.assign(3.0)
    with pytest.raises(ValueError, match="'plain:0' has aggregation NONE and cannot be assigned"):
        call(lambda: strategy.run(lambda: plain.assign(own)))()
    assert float(plain.numpy()) == 3.0
    with strategy.scope(), pytest.raises(ValueError, match="MEAN"):
        tf.Variable(1, aggregation=modes.MEAN)


@pytest.mark.parametrize("outside_first", [True, False])
def test_a_function_is_traced_in_run_and_outside_of_it(tf, strategy, comm, outside_first):
    """A trace of the one reduces, one of the other does not."""
    with strategy.scope():
        variable = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    @tf.function
    def add(addend):
        variable.assign_add(addend)

    calls = [
        lambda: add(tf.constant(10.0)),
        lambda: strategy.run(add, args=(tf.constant(comm.rank + 1.0),)),
    ]
    for call in calls if outside_first else reversed(calls):
        call()
    assert float(variable) == 10 + sum(range(1, comm.size + 1))


def test_variables_aggregated_when_read(tf, strategy, comm, call):
    modes = tf.VariableAggregation
    with strategy.scope():
        made = [
            tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=mode)
            for mode in (modes.SUM, modes.MEAN, modes.ONLY_FIRST_REPLICA)
        ]

    def replica():
        for variable in made:
            variable.assign(comm.rank + 1.0)
            variable.assign_add(1.0)
        return [variable + 0.0 for variable in made]

    local = call(lambda: strategy.run(replica))()
    assert [float(each) for each in local] == [comm.rank + 2.0] * 3
    ranks = np.arange(comm.size)
    expected = [sum(ranks + 2.0), np.mean(ranks + 2.0), 2.0]
    np.testing.assert_allclose([each.numpy() for each in made], expected)
    np.testing.assert_allclose([float(each) for each in made], expected)
    read = call(lambda: [each.value() for each in made])()
    np.testing.assert_allclose(read, expected)
    with strategy.scope():
        weight = tf.Variable(0.0)
    own = [0.0]
    strategy.extended.update(weight, lambda _: own.append(float(made[2].value())))
    assert own[1] == comm.rank + 2.0
    made[0].assign(6.0)
    assert float(strategy.run(made[0].read_value)) == 6.0 / comm.size
    with pytest.raises(ValueError, match="assign_add"):
        made[0].assign_add(1.0)


def test_a_variable_from_outside_of_the_scope(tf, strategy):
    outside = tf.Variable(1.0, name="outside")
    with pytest.raises(ValueError, match="'outside:0' was created outside of the scope"):
        strategy.run(lambda: strategy.extended.update(outside, lambda each: each.assign(2.0)))


def test_contexts(tf, strategy, ds, comm):
    assert not tf.distribute.has_strategy()
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.in_cross_replica_context()
        other = ds.OneDeviceStrategy("/cpu:0").scope()
        with pytest.raises(RuntimeError, match="Mixing different"), other:
            pass
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.reduce("SUM", 1.0, axis=None))
    with pytest.raises(ValueError, match="positional args"):
        strategy.run(lambda: None, args=3)
    assert strategy.num_replicas_in_sync == comm.size
    assert strategy.is_chief == (comm.rank == 0)
    assert isinstance(strategy, tf.distribute.Strategy)


def test_arguments_without_rows(tf, strategy, comm):
    """Scalars, of NumPy and TensorFlow, beside other things, and of unknown rank."""

    def total(value, *_):
        number = value["number"] if isinstance(value, dict) else value
        return tf.distribute.get_replica_context().all_reduce("SUM", number)

    one = tf.constant(1.0)
    for arguments in ((one,), (one, np.ones(3)), ({"number": one, "none": None, "x": one},)):
        for call in (strategy.run, tf.function(strategy.run)):
            assert float(call(total, args=arguments)) == comm.size

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def of_any_rank(value):
        return strategy.run(total, args=(value,))

    for value in (one, tf.ones([2])):
        np.testing.assert_array_equal(of_any_rank(value), value * comm.size)
