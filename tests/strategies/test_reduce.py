"""`Strategy.reduce` between MPI ranks: §2.1 of tf_semantics.md."""

import enum
import sys
from collections import namedtuple

import numpy as np
import pytest

from collectives import Communicator, DtypeMismatchError, OpMismatchError, ShapeMismatchError
from collectives import ReduceOp as CollectiveReduceOp
from strategies import PerReplica, ReduceOp, Variable, VariableAggregation, VariableSynchronization
from tests.strategies.support import refusal, same_refusal

pytestmark = pytest.mark.mpi
two_ranks = pytest.mark.ranks(2)
several_ranks = pytest.mark.ranks(2, 3)

Pair = namedtuple("Pair", "first second")
PARTIAL = ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0])


def partial_batch(strategy, dtype=np.float64):
    return np.array(PARTIAL[strategy.communicator.rank], dtype)


def same(result, expected, dtype=None):
    """Equal in value, shape and dtype."""
    expected = np.asarray(expected, dtype)
    assert isinstance(result, np.ndarray | np.generic)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(result, expected)


def assert_usable(strategy):
    """A valid call after a refused one."""
    size = strategy.num_replicas_in_sync
    total = strategy.reduce("sum", np.float64(strategy.communicator.rank), axis=None)
    same(total, size * (size - 1) / 2, np.float64)


# --- the numbers of §2.1 -------------------------------------------------------------------------


@two_ranks
def test_lengths_that_differ_can_only_be_reduced_over_their_axis(comm, strategy):
    value = partial_batch(strategy)
    text = same_refusal(comm, ShapeMismatchError, "shapes", strategy.reduce, "sum", value, None)
    assert "rank 0: float64 of shape (4,)" in text
    assert "rank 1: float64 of shape (2,)" in text
    assert_usable(strategy)


@two_ranks
def test_a_mean_of_half_precision_does_not_overflow(strategy):
    largest = np.finfo(np.float16).max
    value = np.full(3 + strategy.communicator.rank, largest)
    same(strategy.reduce("MEAN", value, 0), largest, np.float16)


@two_ranks
@pytest.mark.parametrize(
    ("op", "dtype", "expected", "result_dtype"),
    [
        ("SUM", np.float64, 15, np.float64),
        ("MEAN", np.float64, 2.5, np.float64),
        ("SUM", np.float32, 15, np.float32),
        ("MEAN", np.float32, 2.5, np.float32),
        ("MEAN", np.float16, 2.5, np.float16),
        ("SUM", np.int32, 15, np.int32),
        ("MEAN", np.int32, 2.5, np.float64),
        ("MEAN", np.uint8, 2.5, np.float64),
        ("MEAN", np.complex64, 2.5, np.complex64),
    ],
)
@pytest.mark.parametrize("axis", [0, -1, (0,), np.int64(0)])
def test_over_an_axis_each_example_counts_once(strategy, op, dtype, expected, result_dtype, axis):
    same(strategy.reduce(op, partial_batch(strategy, dtype), axis), expected, result_dtype)


@two_ranks
def test_the_mean_of_means_is_another_number(strategy):
    same(strategy.reduce("mean", partial_batch(strategy).mean(), axis=None), 3.0)


@several_ranks
def test_an_empty_replica_counts_for_nothing(strategy):
    mine = [] if strategy.communicator.rank == 1 else [3.0, 6.0]
    others = strategy.num_replicas_in_sync - 1
    same(strategy.reduce("mean", np.array(mine), axis=0), 4.5)
    same(strategy.reduce("sum", np.array(mine), axis=0), 9.0 * others)
    own = np.array(mine).mean() if mine else np.float64("nan")
    same(strategy.reduce("mean", own, axis=None), np.nan)


@several_ranks
def test_the_mean_of_nothing_is_nan(strategy):
    same(strategy.reduce("mean", np.zeros((0, 2)), axis=0), [np.nan, np.nan])
    same(strategy.reduce("sum", np.zeros((0, 2), np.int32), axis=0), [0, 0], np.int32)


@pytest.mark.ranks(3)
def test_three_ranks(strategy):
    rank = strategy.communicator.rank
    block = np.arange(rank * 10, rank * 10 + 2 * (rank + 1)).reshape(rank + 1, 2).astype(np.int32)
    # rows: 0 1 | 10 11, 12 13 | 20 21, 22 23, 24 25
    same(strategy.reduce("sum", block, axis=0), [88, 94], np.int32)
    same(strategy.reduce("mean", block, axis=0), [88 / 6, 94 / 6])
    same(strategy.reduce("sum", block, axis=(0, 1)), 182, np.int32)
    same(strategy.reduce("mean", block, axis=(0, 1)), 182 / 12)
    same(strategy.reduce("sum", block[0], axis=None), [30, 33], np.int32)
    same(strategy.reduce("mean", block[0], axis=None), [10.0, 11.0])


@pytest.mark.parametrize("op", ["sum", "Sum", "SUM", ReduceOp.SUM])
def test_a_plain_value_counts_once_per_replica(strategy, op):
    size = strategy.num_replicas_in_sync
    same(strategy.reduce(op, 3.0, axis=None), 3.0 * size)
    same(strategy.reduce(op, 7, axis=None), 7 * size, np.int64)


@pytest.mark.parametrize("op", ["mean", "Mean", "MEAN", ReduceOp.MEAN])
def test_the_mean_of_plain_values(strategy, op):
    size = strategy.num_replicas_in_sync
    same(strategy.reduce(op, strategy.communicator.rank, axis=None), (size - 1) / 2, np.float64)


def test_nests_keep_their_structure(strategy):
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    keys = ["b", "a"] if rank % 2 else ["a", "b"]
    values = {"a": np.full(2, rank), "b": [np.float32(1), (np.int16(2),)]}
    nest = {key: values[key] for key in keys} | {"c": Pair(first={}, second=1.5)}
    result = strategy.reduce("sum", nest, axis=None)
    assert list(result) == [*keys, "c"]
    same(result["a"], [size * (size - 1) // 2] * 2)
    number, (short,) = result["b"]
    assert (type(result["b"]), type(result["b"][1])) == (list, tuple)
    same(number, size, np.float32)
    same(short, 2 * size, np.int16)
    assert result["c"] == Pair({}, 1.5 * size)
    assert type(result["c"]) is Pair


def test_the_result_is_nobodys_input_and_of_the_same_bits_everywhere(comm, strategy):
    value = np.random.default_rng(comm.rank).normal(size=1000)
    before = value.copy()
    result = strategy.reduce("mean", value, axis=None)
    assert len({each.tobytes() for each in comm.all_gather_object(result)}) == 1
    result[:] = 0
    np.testing.assert_array_equal(value, before)


def test_a_mirrored_variable_counts_once_per_replica(strategy):
    with strategy.scope():
        variable = Variable([1.0, 2.0])
        total = strategy.reduce("sum", {"v": variable}, axis=None)["v"]
    size = strategy.num_replicas_in_sync
    same(total, [1.0 * size, 2.0 * size], np.float32)
    same(strategy.reduce("mean", variable, axis=0), 1.5, np.float32)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["max", "", 1, None, "sum "])
def test_only_sum_and_mean(strategy, op):
    text = f"reduce_op={op!r}: must be ReduceOp.SUM, ReduceOp.MEAN or one of their names"
    assert refusal(ValueError, "reduce_op", strategy.reduce, op, 1, axis=None) == text


@pytest.mark.parametrize("axis", [[0], [0, 1], "0", 0.0, (0, 0.5), (0, [1])])
def test_an_axis_is_an_integer_or_a_tuple(strategy, axis):
    text = refusal(TypeError, "axis", strategy.reduce, "sum", np.ones((2, 2)), axis=axis)
    assert text == f"axis={axis!r}: must be None, an integer or a tuple of integers"


def test_axis_has_no_default(strategy):
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("sum", 1.0)


def on_rank_1(strategy, there, elsewhere):
    return there if strategy.communicator.rank == 1 else elsewhere


@several_ranks
def test_ranks_that_agree_exchange_only_arrays(strategy, monkeypatch):
    """Texts are gathered only where something differs, and one array needs one call."""
    rank, size = strategy.communicator.rank, strategy.communicator.size
    made = []
    for name in ("all_gather_object", "barrier", "all_reduce", "all_reduce_many"):
        original = getattr(Communicator, name)

        def called(self, *arguments, original=original, name=name, **named):
            made.append(name)
            return original(self, *arguments, **named)

        monkeypatch.setattr(Communicator, name, called)
    value = np.full(3, rank, np.float32)
    own = {"array": value, "number": 1.5, "nest": {"a": [value]}, "variable": PerReplica([value])}
    for each in own.values():
        strategy.reduce("sum", each, axis=None)
        strategy.extended.reduce_to("mean", each, destinations=None)
    assert made == ["all_reduce"] * 8
    strategy.reduce("sum", [value, value], axis=None)
    strategy.reduce("mean", value, axis=0)
    strategy.gather(value, axis=0)
    assert made[8:] == [
        "barrier",
        "all_reduce_many",
        "barrier",
        "all_reduce",
        "all_reduce",
        "barrier",
    ]
    same(strategy.reduce("sum", {"a": value}, None)["a"], [size * (size - 1) / 2] * 3, np.float32)


@two_ranks
def test_a_reduction_takes_few_steps(strategy):
    """Counted in Python calls, which the machine's load doesn't change: currently 10 and 11."""
    array = np.ones(256, np.float32)
    cases = {
        "1 KB": (lambda: strategy.reduce("sum", array, axis=None), 20),
        "number": (lambda: strategy.reduce("mean", 1.5, axis=None), 20),
        "nest": (lambda: strategy.reduce("sum", {"a": array}, axis=None), 80),
    }
    for name, (reduce, limit) in cases.items():
        # A waiting rank polls repeatedly.
        fewest = min(calls_of(reduce) for _ in range(100))
        assert fewest <= limit, name


def calls_of(function):
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    function()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


class Torchlike:
    """An array of another library, with DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **named):
        return self._array.__dlpack__(**named)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype)


@several_ranks
@pytest.mark.parametrize("kind", [Torchlike, np.asfortranarray, lambda each: each[::-1][::-1]])
def test_ranks_may_hold_arrays_of_other_kinds(strategy, kind):
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    value = np.full((2, 3), rank + 1.0)
    total = strategy.reduce("sum", kind(value) if rank == 0 else value, axis=None)
    np.testing.assert_array_equal(np.asarray(total), np.full((2, 3), size * (size + 1) / 2))


@several_ranks
@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize(
    ("there", "elsewhere", "error", "shown"),
    [
        (np.ones(2, np.float32), np.ones(2), DtypeMismatchError, "float32 of shape (2,)"),
        (np.ones(2, np.int32), np.ones(2, np.uint32), DtypeMismatchError, "int32 of shape (2,)"),
        (np.ones((2, 3)), np.ones((2, 1)), ShapeMismatchError, "(2, 3)"),
        ([np.ones(2)], [np.ones(2)] * 2, ShapeMismatchError, "[*]"),
        ([np.ones(2)], (np.ones(2),), ShapeMismatchError, "[*]"),
        ({"a": np.ones(2)}, {"b": np.ones(2)}, ShapeMismatchError, "{'a': *}"),
        ({"a": np.ones(2)}, {}, ShapeMismatchError, "{'a': *}"),
        (Pair(np.ones(2), np.ones(2)), (np.ones(2),) * 2, ShapeMismatchError, "Pair(*, *)"),
        ([[np.ones(1)], np.ones(1)], [np.ones(1), [np.ones(1)]], ShapeMismatchError, "[[*], *]"),
    ],
)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_values_that_do_not_fit_together(comm, strategy, op, axis, there, elsewhere, error, shown):
    value = on_rank_1(strategy, there, elsewhere)
    match = "reduce: the ranks' (shapes|dtypes|nests) differ"
    text = same_refusal(comm, error, match, strategy.reduce, op, value, axis)
    if axis is None:  # over an axis, only the other axes must be equal
        assert shown in text.splitlines()[2]
    assert_usable(strategy)


@several_ranks
@pytest.mark.parametrize(
    ("there", "axis", "shown"),
    [
        (np.float64(1), 0, "float64 of shape ()"),
        (np.ones(2), 1, "float64 of shape (2,)"),
        (np.ones(2), (0, 1), "float64 of shape (2,)"),
        ("text", 0, "only numbers can be summed, in str"),
        ([np.ones(2), None], 0, "object of shape ()"),
    ],
)
def test_an_axis_that_one_rank_lacks(comm, strategy, there, axis, shown):
    value = on_rank_1(strategy, there, np.ones((2, 2)))
    text = same_refusal(
        comm,
        ValueError,
        "the value of at least one rank is invalid",
        strategy.reduce,
        "sum",
        value,
        axis,
    )
    assert shown in text.splitlines()[2]
    assert_usable(strategy)


@several_ranks
@pytest.mark.parametrize(
    ("there", "elsewhere"), [(("sum", 0), ("mean", 0)), (("sum", 0), ("sum", None))]
)
def test_ranks_that_request_different_reductions(comm, strategy, there, elsewhere):
    op, axis = on_rank_1(strategy, there, elsewhere)
    value = on_rank_1(strategy, np.ones(1), 1.0) if elsewhere[1] is None else np.ones(1)
    arguments = (strategy.reduce, op, value, axis)
    text = same_refusal(comm, OpMismatchError, "the ranks' arguments differ", *arguments)
    assert "rank 1: reduce(SUM, axis=(0,))" in text
    assert_usable(strategy)


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN"])
def test_a_variable_that_is_aggregated_when_read_counts_once(strategy, aggregation):
    rank, size = strategy.communicator.rank, strategy.communicator.size
    with strategy.scope():
        variable = Variable(
            np.zeros(1),
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation[aggregation],
        )
    strategy.run(variable.assign, ([rank + 1.0],))
    total = size * (size + 1) / 2
    for axis in (None, 0):
        expected = [total] if axis is None else total
        np.testing.assert_array_equal(strategy.reduce("SUM", variable, axis), expected)
    np.testing.assert_array_equal(strategy.gather(variable, 0), np.arange(1.0, size + 1))


class TensorFlows(enum.Enum):
    """As `tf.distribute.ReduceOp`."""

    SUM = "SUM"


def test_the_op_of_collectives_or_tensorflow_will_do(strategy):
    comm = strategy.communicator
    value = comm.rank + 1.0
    total = comm.size * (comm.size + 1) / 2
    assert strategy.reduce(CollectiveReduceOp.SUM, value, axis=None) == total
    assert strategy.reduce(CollectiveReduceOp.MEAN, value, axis=None) == total / comm.size
    assert strategy.reduce(TensorFlows.SUM, value, axis=None) == total
    refusal(ValueError, "reduce_op='max'", strategy.reduce, CollectiveReduceOp.MAX, 1.0, axis=None)


def test_a_function_that_returns_nothing(strategy):
    for call in (strategy.gather, lambda value, axis: strategy.reduce("SUM", value, axis=None)):
        with pytest.raises(TypeError, match=r"of the replicas is None.*given to `run` return what"):
            call(strategy.run(lambda: None), axis=0)
