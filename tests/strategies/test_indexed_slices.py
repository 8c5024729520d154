"""Sparse gradients: concatenated over the replicas, applied as in Keras 3; sparse reads."""

import ml_dtypes
import numpy as np
import pytest

from collectives import MismatchError
from strategies import (
    ReduceOp,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
    optimizers,
)
from strategies.core.indexed_slices import IndexedSlices, embedding_lookup, reduce_slices
from tests.strategies.support import on_ranks, refusal

ROWS = 6


def slices_of(rank, step=0):
    """Rows of a (6, 2) array, row 1 twice; two more than the rank's number."""
    chance = np.random.default_rng([rank, step])
    indices = [1, 1, *chance.integers(0, ROWS, rank)]
    return IndexedSlices(chance.normal(size=(len(indices), 2)), indices, (ROWS, 2))


def dense_of(slices):
    dense = np.zeros((ROWS, 2))
    for row, value in zip(slices.indices, slices.values, strict=True):
        dense[row] += value
    return dense


# --- the slices themselves -----------------------------------------------------------------------


def test_duplicates_are_added_up():
    slices = IndexedSlices([[1.0, 2.0], [10.0, 20.0], [5.0, 5.0]], [3, 0, 3], (4, 2))
    assert slices.to_dense().tolist() == [[10.0, 20.0], [0.0, 0.0], [0.0, 0.0], [6.0, 7.0]]
    summed = slices.summed()
    assert (summed.indices.tolist(), summed.values.tolist()) == ([0, 3], [[10, 20], [6, 7]])
    assert repr(slices) == "<IndexedSlices float64[3, 2] of [4, 2]>"


def test_no_rows_at_all():
    slices = IndexedSlices(np.zeros((0, 2), np.float32), [], [3, 2])
    assert slices.to_dense().tolist() == [[0.0, 0.0]] * 3
    assert slices.summed().values.shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (([1.0, 2.0], [0]), ValueError, "one index for each row"),
        ((1.0, 0), ValueError, "one index for each row"),
        (([1.0], [[0]]), ValueError, "one index for each row"),
        (([1.0], [0.5]), TypeError, "indices has dtype float64: must be integers"),
        (([[1.0, 2.0]], [0], (3, 3)), ValueError, r"dense_shape=\(3, 3\): its rows aren't"),
    ],
)
def test_what_no_slices_can_be_made_of(arguments, error, match):
    refusal(error, match, IndexedSlices, *arguments)


def test_without_a_dense_shape_nothing_dense_is_made():
    refusal(ValueError, "have no dense_shape", IndexedSlices([1.0], [0]).to_dense)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", ReduceOp)
def test_ranks_slices_are_joined_in_their_order(size, op):
    def body(strategy):
        return reduce_slices(strategy.communicator, slices_of(strategy.communicator.rank), op)

    given = [slices_of(rank) for rank in range(size)]
    values = np.concatenate([each.values for each in given]) / (1 if op is ReduceOp.SUM else size)
    for joined in on_ranks(size, body):
        assert joined.indices.tolist() == [row for each in given for row in each.indices]
        np.testing.assert_array_equal(joined.values, values)
        assert joined.dense_shape == (ROWS, 2)


def test_means_of_integers_and_rows_of_other_shapes():
    def body(strategy):
        rank = strategy.communicator.rank
        given = IndexedSlices([rank + 1], [rank], (2,))
        for mean in (
            strategy.reduce("mean", given, axis=None),
            strategy.run(lambda: get_replica_context().all_reduce("mean", given)),
        ):
            assert (mean.values.dtype, mean.values.tolist()) == (np.float64, [0.5, 1.0])
        odd = IndexedSlices([1.0], [0], (3 + rank,))
        with pytest.raises(MismatchError, match=r"rows of \(4,\)"):
            strategy.run(lambda: get_replica_context().all_reduce("sum", odd))
        return rank

    assert on_ranks(2, body) == [0, 1]


# --- applied by optimizers -----------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.1),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_they_count_as_their_sum_made_dense(size, rule):
    """Together with a dense gradient, in several steps with gradients of different rows."""

    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            names = ("sparse", "dense", "bias")
            table, twin, bias = (Variable(np.ones((ROWS, 2)), name=name) for name in names)
            optimizer = OPTIMIZERS[rule]()
        for step in range(3):
            slices = slices_of(rank, step)
            pairs = [(slices, table), (np.full((ROWS, 2), rank), bias), (dense_of(slices), twin)]
            strategy.run(optimizer.apply_gradients, (pairs,))
        return table.numpy(), twin.numpy(), bias.numpy()

    results = on_ranks(size, body)
    for table, twin, bias in results:
        np.testing.assert_allclose(table, twin, rtol=1e-12)
        assert table.tobytes() == results[0][0].tobytes()
        assert (np.unique(bias) != 1).all() or size == 1


def test_descent_touches_only_the_rows_that_have_a_gradient():
    variable, optimizer = Variable(np.array([[1.0], [2.0], [3.0]])), optimizers.SGD(np.inf)
    # An infinite step with a gradient of zero would give NaN.
    optimizer.apply_gradients([(IndexedSlices([[1.0], [2.0]], [2, 2]), variable)])
    assert variable.numpy().tolist() == [[1.0], [2.0], [-np.inf]]


def test_momentum_moves_rows_without_a_gradient_as_well():
    variable, optimizer = Variable(np.zeros((2, 1))), optimizers.SGD(1.0, momentum=0.5)
    for row in (0, 1):
        optimizer.apply_gradients([(IndexedSlices([[1.0]], [row]), variable)])
    assert variable.numpy().tolist() == [[-1.5], [-1.0]]


def test_the_callers_slices_are_not_changed():
    slices, variable = IndexedSlices(np.ones((2, 1)), [0, 1]), Variable(np.zeros((2, 1)))
    for rule in OPTIMIZERS.values():
        rule().apply_gradients([(slices, variable)])
    assert slices.values.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("slices", "match"),
    [
        (
            IndexedSlices([[1.0]], [0]),
            r"slices have rows of \(1,\): <Variable.* has shape \(6, 2\)",
        ),
        (IndexedSlices([[1.0, 1.0]], [6]), r"row 6: <Variable 'table' .*> has rows 0 to 5"),
        (IndexedSlices([[1.0, 1.0]], [-1]), r"row -1: <Variable 'table' .*> has rows 0 to 5"),
        (IndexedSlices([[1.0, 1.0]], [0], (5, 2)), r"slices have dense_shape \(5, 2\)"),
    ],
)
def test_slices_that_do_not_fit_are_refused(slices, match):
    variable, optimizer = Variable(np.zeros((ROWS, 2)), name="table"), optimizers.SGD()
    refusal(ValueError, match, optimizer.apply_gradients, [(slices, variable)])
    assert optimizer.iterations == 0
    refusal(ValueError, "has shape", optimizer.apply_gradients, [(slices, Variable(1.0))])


def test_ranks_of_which_one_has_a_dense_gradient_all_raise():
    def body(strategy):
        with strategy.scope():
            variable, optimizer = Variable(np.zeros((ROWS, 2))), optimizers.SGD(1.0)
        dense = strategy.communicator.rank == 1
        gradient = np.ones((ROWS, 2)) if dense else slices_of(0)
        with pytest.raises(MismatchError) as caught:
            strategy.run(optimizer.apply_gradients, ([(gradient, variable)],))
        assert not variable.numpy().any()
        strategy.run(optimizer.apply_gradients, ([(np.ones((ROWS, 2)), variable)],))
        return type(caught.value), float(variable[0, 0])

    assert on_ranks(3, body) == [(MismatchError, -3.0)] * 3


# --- sparse reads --------------------------------------------------------------------------------

TABLE = np.arange(12.0).reshape(ROWS, 2)


@pytest.mark.parametrize("ids", [[4, 0, 4], [[1], [2]], 3, [], np.array([5], np.uint8)])
def test_rows_are_read(ids):
    rows = embedding_lookup(Variable(TABLE), ids)
    np.testing.assert_array_equal(rows, TABLE[np.asarray(ids, int)])
    np.testing.assert_array_equal(Variable(TABLE).sparse_read(ids), rows)
    rows[...] = 99
    np.testing.assert_array_equal(
        embedding_lookup(Variable(TABLE), ids), TABLE[np.asarray(ids, int)]
    )


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([0, 6], ValueError, "row 6: <Variable .*> has rows 0 to 5"),
        ([-1], ValueError, "row -1: "),
        ([0.0], TypeError, "indices has dtype float64: must be integers"),
        ([True, False], TypeError, "indices has dtype bool: must be integers"),
    ],
)
def test_rows_that_do_not_exist(ids, error, match):
    for function in (embedding_lookup, Variable.sparse_read):
        refusal(error, match, function, Variable(TABLE), ids)


def test_a_variable_of_bfloat16():
    variable = Variable(TABLE.astype(ml_dtypes.bfloat16))
    slices = IndexedSlices(np.ones((2, 2), np.float32), [1, 1])
    optimizers.SGD(1.0).apply_gradients([(slices, variable)])
    assert embedding_lookup(variable, [1]).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_what_is_aggregated_on_read(size):
    def body(strategy):
        with strategy.scope():
            variable = Variable(
                TABLE,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
        strategy.run(variable.assign, (TABLE + strategy.communicator.rank,))
        own = strategy.run(embedding_lookup, (variable, [2]))
        return own.tolist(), embedding_lookup(variable, [2]).tolist()

    total = size * TABLE[2] + sum(range(size))
    assert on_ranks(size, body) == [
        ([(TABLE[2] + rank).tolist()], [total.tolist()]) for rank in range(size)
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce_concatenates_rows_and_sums_arrays(size, op):
    def body(strategy):
        rank = strategy.communicator.rank
        value = {"dense": np.full(2, rank + 1.0), "rows": slices_of(rank)}
        folded = strategy.run(lambda: get_replica_context().all_reduce(op, value))
        return folded["dense"].tolist(), dense_of(folded["rows"]), len(folded["rows"].indices)

    parts = size if op == "mean" else 1
    total = sum(dense_of(slices_of(rank)) for rank in range(size)) / parts
    for dense, rows, count in on_ranks(size, body):
        assert dense == [size * (size + 1) / 2 / parts] * 2
        np.testing.assert_allclose(rows, total, rtol=1e-12)
        assert count == sum(len(slices_of(rank).indices) for rank in range(size))
