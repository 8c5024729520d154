"""All ranks execute the collectives of a `tf.function` in the same order."""

import numpy as np
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.timeout_seconds(300)]


def test_independent_reductions(tf, strategy, comm):
    """Equal shapes: another order would give other numbers, or a mismatch."""
    branch = tf.constant(True)
    variables = [tf.Variable(1.0) for _ in range(4)]

    @tf.function
    def inner(x):
        variables[0].assign_add(1.0)
        return strategy.reduce("SUM", x * 100.0, axis=None)

    @tf.function
    def many(x):
        # The work before each reduction differs by rank, so that they become ready in any order.
        results = []
        for number in range(8):
            work = tf.random.normal([4 + 20 * ((comm.rank + number) % 3)] * 2)
            heavy = tf.reduce_sum(tf.linalg.matmul(work, work)) * 0.0
            results.append(strategy.reduce("SUM", x * number + heavy, axis=None))
            if number % 4 == 1:
                results.append(inner(x + heavy))
            if number % 4 == 2:
                both = tf.cond(
                    branch,
                    lambda: strategy.reduce("SUM", x * 1000.0, axis=None),
                    lambda: variables[1].assign_add(1.0),
                )
                results.append(both)
        count = tf.constant(0.0)
        for step in tf.range(3):
            count += strategy.reduce("SUM", x * tf.cast(step, tf.float32), axis=None)
            variables[2].assign_add(count)
        return results, count

    x = tf.constant(comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    factors = [0, 1, 100, 2, 1000, 3, 4, 5, 100, 6, 1000, 7]
    for _ in range(10):
        results, count = many(x)
        np.testing.assert_array_equal(results, [total * each for each in factors])
        assert float(count) == 3 * total


def test_one_function_of_two_strategies(tf, ds, strategy, comm):
    """Each strategy's calls execute its own collectives, whichever traced the function first."""
    alone = ds.OneDeviceStrategy("/cpu:0")
    x, total = tf.constant(comm.rank + 1.0), comm.size * (comm.size + 1) / 2

    def add():
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    for first, then in [(strategy, alone), (alone, strategy)]:
        function = tf.function(add)
        got = {each: float(each.run(function)) for each in (first, then, first)}
        assert got == {strategy: total, alone: comm.rank + 1.0}
        assert float(function()) == comm.rank + 1.0
        assert function.experimental_get_tracing_count() == 3
