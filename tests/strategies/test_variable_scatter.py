"""Scatter methods, rule by rule: §2.9 of tf_semantics.md.

Every variable begins at [[10, 20], [30, 40], [50, 60]]; replica r updates rows 0 and 2 with
r + 1, and rows 0, 2, 0 are scattered for all replicas.
"""

import pickle

import numpy as np
import pytest

from strategies import Variable, VariableAggregation, VariableSynchronization
from strategies.core.indexed_slices import IndexedSlices
from strategies.variables import scatter
from tests.slow import slow
from tests.strategies.support import lone_strategy, on_ranks, refusal

START = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
FOLDS = {
    "scatter_add": lambda row, value: row + value,
    "scatter_sub": lambda row, value: row - value,
    "scatter_mul": lambda row, value: row * value,
    "scatter_div": lambda row, value: row / value,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": lambda row, value: np.asarray(value),
}
SUMMED = ["scatter_add", "scatter_sub", "scatter_mul", "scatter_div"]
UNSUMMED = ["scatter_min", "scatter_max", "scatter_update"]
on_sizes = pytest.mark.parametrize("size", [1, 3, *slow(2)])
with_methods = pytest.mark.parametrize("method", FOLDS)
all_aggregations = pytest.mark.parametrize("aggregation", VariableAggregation.__members__)


def variable_of(strategy, aggregation="NONE", synchronization="ON_WRITE", dtype=np.float64):
    with strategy.scope():
        return Variable(
            START.astype(dtype),
            synchronization=VariableSynchronization[synchronization],
            aggregation=VariableAggregation[aggregation],
        )


def changed(method, slices):
    """The rows after one change after the other."""
    expected = START.copy()
    for row, value in zip(slices.indices, slices.values, strict=True):
        expected[row] = FOLDS[method](expected[row], value)
    return expected


def own_slices(rank):
    return IndexedSlices(np.full((2, 2), rank + 1.0), [0, 2])


FOR_ALL = IndexedSlices([[2.0, 30.0], [3.0, 70.0], [4.0, 1.0]], [0, 2, 0])


def in_scope(strategy, function):
    with strategy.scope():
        return function()


@on_sizes
@all_aggregations
@with_methods
def test_for_all_replicas_the_rows_are_changed_as_they_are(size, aggregation, method):
    def body(strategy):
        variable = variable_of(strategy, aggregation)
        assert in_scope(strategy, lambda: getattr(variable, method)(FOR_ALL)) is variable
        return variable.numpy().tolist()

    assert on_ranks(size, body) == [changed(method, FOR_ALL).tolist()] * size


@on_sizes
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("method", SUMMED)
def test_replicas_rows_are_joined_and_for_a_mean_divided(size, aggregation, method):
    def body(strategy):
        variable = variable_of(strategy, aggregation)
        strategy.run(getattr(variable, method), (own_slices(strategy.communicator.rank),))
        return variable.numpy().tolist()

    parts = [own_slices(rank) for rank in range(size)]
    values = np.concatenate([part.values for part in parts])
    joined = IndexedSlices(values if aggregation == "SUM" else values / size, [0, 2] * size)
    assert on_ranks(size, body) == [changed(method, joined).tolist()] * size


@on_sizes
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("method", UNSUMMED)
def test_a_sum_of_rows_does_not_give_min_max_or_update(size, aggregation, method):
    def body(strategy):
        variable = variable_of(strategy, aggregation)
        match = f"{method} inside `run` needs aggregation ONLY_FIRST_REPLICA, not {aggregation}"
        call = (NotImplementedError, match, getattr(variable, method), own_slices(0))
        strategy.run(refusal, call)
        return variable.numpy().tolist()

    assert on_ranks(size, body) == [START.tolist()] * size


@on_sizes
@with_methods
def test_the_first_replicas_rows_count(size, method):
    def body(strategy):
        variable, rank = variable_of(strategy, "ONLY_FIRST_REPLICA"), strategy.communicator.rank
        # The others may have more rows.
        rows = IndexedSlices(np.full((2 + rank, 2), rank + 1.0), [0, 2, *[1] * rank])
        strategy.run(getattr(variable, method), (rows,))
        return variable.numpy().tolist()

    assert on_ranks(size, body) == [changed(method, own_slices(0)).tolist()] * size


@on_sizes
@with_methods
def test_without_an_aggregation_replicas_may_not_scatter(size, method):
    def body(strategy):
        variable = variable_of(strategy)
        match = "can't be assigned inside `run` with aggregation NONE"
        strategy.run(refusal, (ValueError, match, getattr(variable, method), own_slices(0)))
        return variable.numpy().tolist()

    assert on_ranks(size, body) == [START.tolist()] * size


@on_sizes
@all_aggregations
@with_methods
def test_on_read_each_replica_scatters_into_its_own(size, aggregation, method):
    def body(strategy):
        variable = variable_of(strategy, aggregation, "ON_READ")
        match = f"ON_READ variables don't support {method} outside of `run`"
        in_scope(
            strategy,
            lambda: refusal(NotImplementedError, match, getattr(variable, method), FOR_ALL),
        )
        strategy.run(getattr(variable, method), (own_slices(strategy.communicator.rank),))
        return strategy.run(variable.numpy).tolist()

    assert on_ranks(size, body) == [
        changed(method, own_slices(rank)).tolist() for rank in range(size)
    ]


@with_methods
def test_without_a_strategy_too(method):
    variable = Variable(START)
    getattr(variable, method)(FOR_ALL)
    assert variable.numpy().tolist() == changed(method, FOR_ALL).tolist()


REFUSED = {
    "rows of another shape": (IndexedSlices([1], [0]), ValueError, r"rows of \(\)"),
    "no such row": (IndexedSlices([[1, 1]], [3]), ValueError, "row 3: <.*> has rows 0 to 2"),
    "fractions": (IndexedSlices([[1.5, 1.0]], [0]), TypeError, "dtype float64, which <.*int64"),
}


@pytest.mark.parametrize("case", REFUSED)
@with_methods
def test_rows_that_do_not_fit(case, method):
    slices, error, match = REFUSED[case]
    variable = variable_of(lone_strategy(), dtype=np.int64)
    if method == "scatter_div":
        error, match = TypeError, "holds integers: scatter_div would lose fractions"
    refusal(error, match, getattr(variable, method), slices)
    assert variable.numpy().tolist() == START.tolist()


@pytest.mark.parametrize("method", [each for each in FOLDS if each != "scatter_div"])
def test_integers(method):
    variable = variable_of(lone_strategy(), dtype=np.int32)
    slices = IndexedSlices(FOR_ALL.values.astype(int), FOR_ALL.indices)
    getattr(variable, method)(slices)
    assert variable.dtype == np.int32
    assert variable.numpy().tolist() == changed(method, slices).tolist()


@with_methods
def test_a_change_can_be_sent(method):
    """By name, for any owner of the array."""
    change = pickle.loads(pickle.dumps(getattr(scatter, method)))
    array = START.copy()
    change(array, FOR_ALL.indices, FOR_ALL.values)
    assert array.tolist() == changed(method, FOR_ALL).tolist()
