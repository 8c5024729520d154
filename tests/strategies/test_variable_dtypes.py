"""The dtype of a variable; the first table was verified with TensorFlow 2.21."""

import ml_dtypes
import numpy as np
import pytest

from collectives import DtypeMismatchError
from strategies import IndexedSlices, ShardedVariable, Variable
from tests.strategies.support import refusal, same_refusal

CHOSEN = [
    (1.0, "float32"),
    (1, "int32"),
    (True, "bool"),
    ([1.0, 2.0], "float32"),
    ([1, 2], "int32"),
    ([1, 2.0], "float32"),
    ((1.0,), "float32"),
    ([[1.0], [2.0]], "float32"),
    ([], "float32"),
    (1j, "complex128"),
    (1 << 31, "int64"),
    (-(1 << 31), "int32"),
    ([1, 1 << 40], "int64"),
    (range(3), "int32"),
    ([range(1 << 31, (1 << 31) + 2)], "int64"),
    ([True, False], "bool"),
    ([1, True], "int32"),
    ([1.0, True], "float32"),
    (np.float64(1), "float64"),
    (np.float32(1), "float32"),
    (np.int64(5), "int64"),
    (np.array([1.0]), "float64"),
    (np.arange(3), "int64"),
    (np.array(1, ml_dtypes.bfloat16), "bfloat16"),
    ([np.float64(1), 2.0], "float64"),
    ([np.arange(2.0)], "float64"),
    (lambda: 1.0, "float32"),
    (lambda: np.ones(2), "float64"),
]

# TensorFlow uses the dtype of a list's first number, and so loses that of the others.
KEPT = [([1.0, np.float64(2)], "float64"), ([np.int64(1 << 20)], "int64")]

GIVEN = [
    (1.0, np.float64, "float64"),
    (1.0, "float64", "float64"),
    (1, np.float32, "float32"),
    (1.0, float, "float32"),
    (1, int, "int32"),
    (True, np.float32, "float32"),
    (1j, np.complex64, "complex64"),
    (np.array([1.0]), np.float32, "float32"),
    (np.arange(3), np.float32, "float32"),
    (np.int64(3), np.int32, "int32"),
    ([1, 2], ">i8", "int64"),
    (lambda: 1.0, np.float16, "float16"),
]


def test_the_dtype_is_tensorflows():
    for value, dtype in CHOSEN + KEPT:
        variable = Variable(value)
        assert variable.dtype == dtype, repr(value)
        assert variable.dtype.isnative
        np.testing.assert_array_equal(variable, value() if callable(value) else value)


def test_a_dtype_may_be_given():
    for value, given, dtype in GIVEN:
        variable = Variable(value, dtype=given)
        assert variable.dtype == dtype, (value, given)
        assert variable.dtype.isnative
        np.testing.assert_array_equal(variable, value() if callable(value) else value)


def test_what_a_dtype_would_lose_is_refused():
    """TensorFlow refuses Python numbers, and truncates arrays; integers wrap there."""
    for value, dtype in ((1.5, np.int32), (np.array([1.5]), np.int32), (1j, np.float32)):
        refusal(
            TypeError, "initial_value has dtype .*: convert it first", Variable, value, dtype=dtype
        )
    for value, dtype in ((-1, np.uint8), (300, np.uint8), ([1, 1 << 40], np.int32)):
        refusal(OverflowError, "initial_value has .*can't hold", Variable, value, dtype=dtype)
        refusal(OverflowError, "value has .*can't hold", Variable(0, dtype=dtype).assign, value)
    slices = IndexedSlices(np.array([1 << 40]), [0])
    refusal(OverflowError, "value has .*can't hold", Variable([0]).scatter_add, slices)
    refusal(TypeError, "not understood", Variable, 1, dtype="nonsense")
    for value in ([True, 1], ([True], [1.0])):
        refusal(ValueError, "initial_value has numbers after a bool", Variable, value)


def test_value_is_a_copy():
    variable = Variable([1.0, 2.0])
    value = variable.value()
    value[:] = 0
    np.testing.assert_array_equal(variable.value(), [1.0, 2.0])
    assert variable.value().dtype == np.float32


def test_numbers_that_are_assigned_take_the_variables_dtype():
    variable = Variable(1.0)
    variable.assign(2.5).assign_add(np.float64(1))
    assert (variable.value(), variable.dtype) == (3.5, np.float32)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_ranks_agree_on_the_dtype(comm, strategy):
    def made(value, dtype):
        with strategy.scope():
            return Variable(value, dtype=dtype)

    dtype = np.float64 if comm.rank else None
    same_refusal(comm, DtypeMismatchError, "float64 of shape", made, 1.0, dtype)
    variable = made(float(comm.rank), np.float64)
    assert (variable.dtype, float(variable)) == (np.float64, 0.0)


def test_a_sharded_variable_is_not_made_of_variables():
    """TensorFlow's constructor: here a strategy creates the variable."""
    parts = [Variable([[1.0], [2.0]]), Variable([[3.0]])]
    for given in ((parts,), (), (np.ones(3),)):
        text = refusal(
            TypeError, "a ShardedVariable isn't made of variables", ShardedVariable, *given
        )
        assert "ParameterServerStrategy(variable_partitioner=" in text
