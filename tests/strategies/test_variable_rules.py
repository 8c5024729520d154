"""Assignments and reads on every replica, rule by rule: §2.9 of tf_semantics.md.

Every variable begins at 10, replica r has the value r + 1, and for all replicas 7 is assigned.
"""

import numpy as np
import pytest

from strategies import Variable, VariableAggregation, VariableSynchronization, get_replica_context
from tests.slow import slow
from tests.strategies.support import lone_strategy, on_ranks, refusal

METHODS = {"assign": lambda old, new: new, "assign_add": np.add, "assign_sub": np.subtract}
NO_WAY_IN = "can't be assigned inside `run` with aggregation NONE"
NO_WAY_OUT = "with aggregation NONE it can't be read outside of `run`"
NO_MEANING = "outside of `run` has no meaning for a sum of replicas"


def variable_of(strategy, synchronization, aggregation, dtype=np.float32):
    with strategy.scope():
        return Variable(
            np.array(10, dtype),
            synchronization=VariableSynchronization[synchronization],
            aggregation=VariableAggregation[aggregation],
        )


def folded(aggregation, values):
    """The replicas' values afterwards."""
    folds = {"SUM": np.sum, "MEAN": np.mean, "ONLY_FIRST_REPLICA": lambda each: each[0]}
    return float(folds[aggregation](values))


def in_scope(strategy, function):
    with strategy.scope():
        return function()


def in_merge_call(strategy, function):
    return strategy.run(lambda: get_replica_context().merge_call(lambda _: function()))


CROSS_REPLICA = {
    "scope": in_scope,
    "merge_call": in_merge_call,
    "no context": lambda strategy, function: function(),
}
for_all_replicas = pytest.mark.parametrize("where", CROSS_REPLICA.values(), ids=CROSS_REPLICA)
on_sizes = pytest.mark.parametrize("size", [1, 3, *slow(2)])
with_methods = pytest.mark.parametrize("method", METHODS)
aggregated = pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
all_aggregations = pytest.mark.parametrize("aggregation", VariableAggregation.__members__)
on_write = pytest.mark.parametrize("synchronization", ["AUTO", "ON_WRITE"])


def call(variable, method, value):
    assert getattr(variable, method)(value) is variable


# --- on write ------------------------------------------------------------------------------------


@on_sizes
@on_write
@aggregated
@with_methods
def test_replicas_values_are_aggregated_before_they_are_written(
    size, synchronization, aggregation, method
):
    def body(strategy):
        variable = variable_of(strategy, synchronization, aggregation)
        strategy.run(call, (variable, method, strategy.communicator.rank + 1))
        return float(strategy.run(variable.read_value)), float(variable), variable.dtype

    change = folded(aggregation, range(1, size + 1))
    expected = float(METHODS[method](10, change))
    assert on_ranks(size, body) == [(expected, expected, np.float32)] * size


@on_sizes
@on_write
@with_methods
def test_without_an_aggregation_replicas_may_not_write(size, synchronization, method):
    def body(strategy):
        variable = variable_of(strategy, synchronization, "NONE")
        strategy.run(refusal, (ValueError, NO_WAY_IN, getattr(variable, method), 1.0))
        return float(variable)

    assert on_ranks(size, body) == [10.0] * size


@on_sizes
@on_write
@all_aggregations
@with_methods
@for_all_replicas
def test_for_all_replicas_the_value_is_written_as_it_is(
    size, synchronization, aggregation, method, where
):
    def body(strategy):
        variable = variable_of(strategy, synchronization, aggregation)
        where(strategy, lambda: call(variable, method, 7))
        return float(where(strategy, variable.read_value)), float(strategy.run(variable.numpy))

    expected = float(METHODS[method](10, 7))
    assert on_ranks(size, body) == [(expected, expected)] * size


# --- on read -------------------------------------------------------------------------------------


@on_sizes
@all_aggregations
@with_methods
def test_each_replica_writes_and_reads_its_own(size, aggregation, method):
    def body(strategy):
        variable = variable_of(strategy, "ON_READ", aggregation)
        strategy.run(call, (variable, method, strategy.communicator.rank + 1))
        return [float(strategy.run(read)) for read in (variable.numpy, lambda: variable + 0)]

    assert on_ranks(size, body) == [
        [float(METHODS[method](10, rank + 1))] * 2 for rank in range(size)
    ]


@on_sizes
@aggregated
@for_all_replicas
def test_a_read_for_all_replicas_aggregates(size, aggregation, where):
    def body(strategy):
        variable = variable_of(strategy, "ON_READ", aggregation)
        strategy.run(call, (variable, "assign", strategy.communicator.rank + 1))
        reads = [variable.read_value, lambda: np.asarray(variable), lambda: variable * 1]
        reads += [lambda: variable[()], lambda: float(variable), lambda: np.abs(variable)]
        values = [where(strategy, read) for read in reads]
        assert values[0].dtype == np.float32
        return [float(value) for value in values]

    expected = np.float32(folded(aggregation, range(1, size + 1)))
    assert on_ranks(size, body) == [[float(expected)] * 6] * size


@on_sizes
@for_all_replicas
def test_without_an_aggregation_it_is_read_by_replicas_only(size, where):
    def body(strategy):
        variable = variable_of(strategy, "ON_READ", "NONE")
        where(strategy, lambda: refusal(ValueError, NO_WAY_OUT, variable.read_value))
        return float(strategy.run(variable.read_value))

    assert on_ranks(size, body) == [10.0] * size


@on_sizes
@all_aggregations
@for_all_replicas
def test_an_assignment_for_all_replicas_reads_back(size, aggregation, where):
    def body(strategy):
        variable = variable_of(strategy, "ON_READ", aggregation, np.float64)
        where(strategy, lambda: call(variable, "assign", 7))
        own = float(strategy.run(variable.read_value))
        return own, 7.0 if aggregation == "NONE" else float(variable)

    own = 7.0 / size if aggregation == "SUM" else 7.0
    assert on_ranks(size, body) == [(own, pytest.approx(7.0))] * size


@on_sizes
@all_aggregations
@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
@for_all_replicas
def test_a_shift_for_all_replicas_shifts_each_unless_they_are_summed(
    size, aggregation, method, where
):
    def body(strategy):
        variable = variable_of(strategy, "ON_READ", aggregation)
        if aggregation == "SUM":
            match = f"{method} {NO_MEANING}"
            where(strategy, lambda: refusal(ValueError, match, getattr(variable, method), 7))
        else:
            where(strategy, lambda: call(variable, method, 7))
        return float(strategy.run(variable.read_value))

    expected = 10.0 if aggregation == "SUM" else float(METHODS[method](10, 7))
    assert on_ranks(size, body) == [expected] * size


@pytest.mark.parametrize(
    ("size", "value", "own", "read"),
    [(2, 7, 3, 6), (2, -7, -3, -6), (3, 7, 2, 6), (3, 2, 0, 0), (1, 7, 7, 7), (2, 8, 4, 8)],
)
def test_a_sum_of_integers_loses_the_rest(size, value, own, read):
    def body(strategy):
        variable = variable_of(strategy, "ON_READ", "SUM", np.int32)
        variable.assign(value)
        assert variable.numpy().dtype == np.int32
        return int(strategy.run(variable.read_value)), int(variable)

    assert on_ranks(size, body) == [(own, read)] * size


# --- any rule ------------------------------------------------------------------------------------

REFUSED = {
    "another shape": (
        [1.0],
        np.float32,
        ValueError,
        r"value has shape \(1,\): <Var.*has shape \(\)",
    ),
    "fractions": (1.7, np.int32, TypeError, "value has dtype float64, which <Variable int32"),
    "complex": (1j, np.float64, TypeError, "value has dtype complex128, which <Variable float64"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@with_methods
def test_values_that_do_not_fit(case, synchronization, method):
    value, dtype, error, match = REFUSED[case]
    strategy = lone_strategy()
    variable = variable_of(strategy, synchronization, "SUM", dtype)
    with strategy.scope():
        refusal(error, match, getattr(variable, method), value)
    strategy.run(refusal, (error, match, getattr(variable, method), value))
    assert variable.numpy().tolist() == 10


@all_aggregations
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@with_methods
def test_without_a_strategy_a_variable_is_plain(synchronization, aggregation, method):
    variable = Variable(
        10.0, True, None, VariableSynchronization[synchronization], VariableAggregation[aggregation]
    )
    expected = float(METHODS[method](10, 7))
    getattr(variable, method)(7)
    assert float(variable) == expected
    with lone_strategy().scope():
        assert float(variable) == expected
    assert float(lone_strategy().run(variable.assign, (3,))) == 3.0


@aggregated
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("size", [2, 3])
def test_variables_outside_of_every_scope_are_not_aggregated(size, synchronization, aggregation):
    """So several replicas can't change it, unless it requests no aggregation."""

    def plain(chosen):
        return Variable(10.0, True, None, VariableSynchronization[synchronization], chosen)

    def body(strategy):
        rank, own = strategy.communicator.rank, plain(VariableAggregation.NONE)
        variable = plain(VariableAggregation[aggregation])
        refusal(RuntimeError, "create it in that", strategy.run, variable.assign_add, (1.0,))
        assert float(variable) == 10.0
        return float(strategy.run(own.assign_add, (rank + 1.0,)))

    assert on_ranks(size, body) == [11.0 + rank for rank in range(size)]
