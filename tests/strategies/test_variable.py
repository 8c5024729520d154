"""Variables as arrays: initial values, reads, and refused uses."""

import operator

import ml_dtypes
import numpy as np
import pytest

from collectives import DtypeMismatchError, ShapeMismatchError
from strategies import Variable, VariableAggregation, VariableSynchronization, get_strategy
from tests.slow import slow
from tests.strategies.support import lone_strategy, on_ranks, refusal

ENUMS = [
    (VariableSynchronization, {"AUTO": 0, "NONE": 1, "ON_WRITE": 2, "ON_READ": 3}),
    (VariableAggregation, {"NONE": 0, "SUM": 1, "MEAN": 2, "ONLY_FIRST_REPLICA": 3}),
]


@pytest.mark.parametrize(("enum", "values"), ENUMS)
def test_the_enums_are_tensorflows(enum, values):
    assert {each.name: each.value for each in enum} == values


# --- creation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, *slow(2, 4)])
@pytest.mark.parametrize("form", [np.asarray, np.ndarray.tolist, lambda value: lambda: value])
def test_the_chiefs_initial_value_counts_on_every_rank(size, form):
    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            return Variable(form(np.array([[rank + 0.5, -rank]]))).numpy()

    dtype = np.float32 if form is np.ndarray.tolist else np.float64
    for value in on_ranks(size, body):
        assert (value.tolist(), value.dtype) == ([[0.5, 0.0]], dtype)


@pytest.mark.parametrize(
    "initial",
    [
        np.float32(2.5),
        True,
        np.zeros((0, 3), np.int8),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(12.0)[::-3],
        np.array([1 + 2j], np.complex64),
        np.array([1, 2, 3], ml_dtypes.bfloat16),
        np.array([2**53 + 1]),
    ],
)
def test_any_array_of_numbers(initial):
    def body(strategy):
        with strategy.scope():
            variable = Variable(initial)
        return variable.shape, variable.dtype, variable.numpy()

    expected = np.asarray(initial)
    for shape, dtype, value in on_ranks(2, body):
        assert (shape, dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(value, expected)


def test_foreign_byte_orders_do_not_garble_values():
    def body(strategy):
        with strategy.scope():
            return Variable(np.array([1.5], "<f8" if strategy.communicator.rank else ">f8")).numpy()

    assert [value.tolist() for value in on_ranks(2, body)] == [[1.5], [1.5]]


@pytest.mark.parametrize("aggregation", VariableAggregation)
@pytest.mark.parametrize(
    ("there", "elsewhere", "error"),
    [
        (np.zeros(3), np.zeros(2), ShapeMismatchError),
        (np.zeros(()), np.zeros(1), ShapeMismatchError),
        (np.zeros(2, np.float32), np.zeros(2), DtypeMismatchError),
        (np.zeros(2, np.int32), np.zeros(2), DtypeMismatchError),
        (np.zeros(2), np.zeros(2, np.int32), DtypeMismatchError),
    ],
)
def test_ranks_with_different_arrays_all_raise(there, elsewhere, error, aggregation):
    def body(strategy):
        value = there if strategy.communicator.rank == 1 else elsewhere
        with strategy.scope():
            match = r"Variable 'w'( \(aggregation=\w+\))?: the ranks' (shapes|dtypes) differ"
            text = refusal(error, match, Variable, value, name="w", aggregation=aggregation)
            usable = Variable(strategy.communicator.rank + 1.0)
        return text, float(usable)

    results = on_ranks(3, body)
    assert results == [(results[0][0], 1.0)] * 3
    assert f"rank 1: {there.dtype} of shape {there.shape}" in results[0][0]


@pytest.mark.parametrize("aggregation", VariableAggregation)
def test_synchronization_none_is_refused(aggregation):
    none = VariableSynchronization.NONE
    match = r"synchronization=VariableSynchronization.NONE: must be AUTO, ON_WRITE or ON_READ"
    refusal(ValueError, match, Variable, 1.0, synchronization=none, aggregation=aggregation)


@pytest.mark.parametrize("wrong", ["on_read", 3, None, VariableAggregation.SUM])
def test_what_is_no_synchronization_is_refused(wrong):
    match = f"synchronization={wrong}: must be AUTO, ON_WRITE or ON_READ"
    refusal(ValueError, match, Variable, 1.0, synchronization=wrong)


@pytest.mark.parametrize("wrong", ["sum", 1, None, VariableSynchronization.ON_READ])
def test_what_is_no_aggregation_is_refused(wrong):
    refusal(
        ValueError,
        r"must be of VariableAggregation \(NONE, SUM, ",
        Variable,
        1.0,
        aggregation=wrong,
    )


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_])
def test_the_mean_of_integers_is_refused(dtype):
    match = rf"aggregation=VariableAggregation.MEAN: needs a floating dtype, not {np.dtype(dtype)}"
    refusal(ValueError, match, Variable, np.zeros(2, dtype), aggregation=VariableAggregation.MEAN)


def test_a_variable_remembers_what_it_was_given():
    strategy = lone_strategy()
    with strategy.scope():
        variable = Variable([1.0], False, "bias", aggregation=VariableAggregation.SUM)
    assert (variable.name, variable.trainable) == ("bias", False)
    assert (variable.strategy, Variable(0).strategy) == (strategy, get_strategy())
    assert variable.aggregation is VariableAggregation.SUM
    assert Variable(0).trainable
    assert repr(variable) == "<Variable 'bias' float32[1]>"
    assert repr(Variable(0)) == "<Variable int32[]>"


def test_text_is_no_initial_value():
    refusal(TypeError, "dtype <U4", Variable, "text")


# --- as an array ---------------------------------------------------------------------------------

ARRAY = np.array([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])


@pytest.mark.parametrize(
    "function",
    [
        lambda v: v + 1,
        lambda v: 1 - v,
        lambda v: v / v,
        lambda v: v**2,
        lambda v: -v,
        lambda v: +v,
        abs,
        lambda v: v > 0,
        lambda v: v == v,
        lambda v: v @ ARRAY.T,
        lambda v: ARRAY.T @ v,
        lambda v: ARRAY + v,
        lambda v: divmod(v, 2)[1],
        np.exp,
        np.sum,
        np.mean,
        np.add.reduce,
        lambda v: np.add(v, 1, out=np.empty_like(ARRAY)),
        lambda v: np.concatenate([v, v]),
        lambda v: np.asarray(v, np.float32),
        lambda v: np.array(v),
        lambda v: v[1],
        lambda v: v[:, ::2],
        lambda v: v[[1, 0]],
        lambda v: v[ARRAY > 0],
        lambda v: v[1, 2],
        lambda v: list(v)[1],
        len,
    ],
)
def test_what_works_on_an_array_works_on_a_variable(function):
    variable = Variable(ARRAY)
    result, expected = function(variable), function(ARRAY)
    assert not isinstance(result, Variable)
    assert np.asarray(result).dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize(
    "read",
    [
        Variable.read_value,
        Variable.numpy,
        np.asarray,
        np.array,
        np.ravel,
        np.positive,
        lambda v: v[...],
        lambda v: v[0],
        lambda v: v[:, 1:],
        lambda v: v[0, ...],
        lambda v: next(iter(v)),
    ],
)
def test_results_share_no_memory_with_the_variable(read, synchronization):
    variable = Variable(ARRAY, synchronization=VariableSynchronization[synchronization])
    result = read(variable)
    result[...] = 99
    np.testing.assert_array_equal(variable.numpy(), ARRAY)


def test_numbers():
    assert float(Variable(2.5)) == 2.5
    assert int(Variable(7)) == 7
    assert [bool(Variable(each)) for each in (0.0, 1.0, [0], [2])] == [False, True, False, True]
    refusal(ValueError, "ambiguous", bool, Variable([0, 0]))
    refusal(TypeError, "0-d", list, Variable(3.0))
    refusal(TypeError, "unsized", len, Variable(3.0))


def test_the_initial_value_is_copied():
    initial = np.zeros(2)
    variable = Variable(initial)
    initial[0] = 5
    assert variable.numpy().tolist() == [0.0, 0.0]
    variable.assign_add([1.0, 1.0])
    assert initial.tolist() == [5.0, 0.0]


def test_a_variable_changes_only_by_assignment():
    variable = Variable([1.0, 2.0])
    refusal(TypeError, "can't be the output: use assign", operator.iadd, variable, 1)
    refusal(TypeError, "can't be the output: use assign", np.add, 1, 1, out=variable)
    refusal(TypeError, "add.at can't change a Variable", np.add.at, variable, 0, 5.0)
    refusal(TypeError, "item assignment", operator.setitem, variable, 0, 5.0)
    refusal(ValueError, "can't be read without a copy", np.array, variable, copy=False)
    assert variable.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_assigned_is_copied(size):
    def body(strategy):
        with strategy.scope():
            variable = Variable(10.0, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
        value = np.array(strategy.communicator.rank, np.float64)
        strategy.run(variable.assign, (value,))
        value += 50
        return float(variable), float(value)

    assert on_ranks(size, body) == [(0.0, 50.0 + rank) for rank in range(size)]
