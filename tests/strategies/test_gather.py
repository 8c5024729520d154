"""`gather` for all replicas, and collective calls of replicas inside `run`."""

import numpy as np
import pytest

from collectives import DtypeMismatchError, OpMismatchError, ShapeMismatchError
from strategies import ReduceOp, Variable, get_replica_context
from tests.strategies.support import refusal, same_refusal

pytestmark = pytest.mark.mpi


def rows_of(rank):
    """Rank r has r + 1 rows of two columns; values depend on rank and row."""
    return np.array([[10.0 * rank + row, -row] for row in range(rank + 1)])


def all_rows(size):
    return np.concatenate([rows_of(rank) for rank in range(size)])


def inside(strategy, function):
    """The function of the replica context, called inside `run`."""
    return strategy.run(lambda: function(get_replica_context()))


WAYS = {
    "gather": lambda strategy, value, axis: strategy.gather(value, axis=axis),
    "all_gather": lambda strategy, value, axis: inside(
        strategy, lambda replica: replica.all_gather(value, axis=axis)
    ),
}
in_both_ways = pytest.mark.parametrize("gather", WAYS.values(), ids=WAYS)


@in_both_ways
def test_rows_are_in_the_order_of_the_replicas(strategy, gather):
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    result = gather(strategy, {"x": rows_of(rank), "y": (np.int16([rank]),)}, 0)
    np.testing.assert_array_equal(result["x"], all_rows(size))
    np.testing.assert_array_equal(result["y"][0], np.arange(size))
    assert (result["x"].dtype, result["y"][0].dtype) == (np.float64, np.int16)
    assert type(result["y"]) is tuple


@in_both_ways
@pytest.mark.parametrize("axis", [1, -1])
def test_along_another_axis(strategy, gather, axis):
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    result = gather(strategy, rows_of(rank).T, axis)
    np.testing.assert_array_equal(result, all_rows(size).T)


@in_both_ways
def test_the_truth_about_all_gather_of_0_and_1(strategy, gather):
    # TensorFlow's own documentation has [1, 2]: §2.14.
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    np.testing.assert_array_equal(gather(strategy, np.array([rank]), 0), np.arange(size))


@in_both_ways
def test_empty_parts(strategy, gather):
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    mine = np.full((rank % 2, 3), rank, np.int8)
    result = gather(strategy, mine, 0)
    assert (result.shape, result.dtype) == ((size // 2, 3), np.int8)
    assert list(result[:, 0]) == list(range(1, size, 2))


@in_both_ways
def test_a_variable_is_gathered_by_its_value(strategy, gather):
    with strategy.scope():
        variable = Variable([1.0, 2.0])
    result = gather(strategy, variable, 0)
    np.testing.assert_array_equal(result, [1.0, 2.0] * strategy.num_replicas_in_sync)


ONE = np.ones(1)


def on_rank_1(strategy, there, elsewhere):
    return there if strategy.communicator.rank == 1 else elsewhere


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("there", "elsewhere", "axis", "error", "match"),
    [
        (np.ones((2, 3)), np.ones((2, 2)), 0, ShapeMismatchError, "different shapes"),
        (np.ones(2), np.ones(2, np.int32), 0, DtypeMismatchError, "different dtypes"),
        (np.ones(2), np.ones((2, 2)), 1, ValueError, r"rank 1: no axis 1 in .* \[\(2,\)\]"),
        (np.ones(2), np.ones((2, 2)), -2, ValueError, "rank 1: no axis -2"),
        ([np.ones(2)], [np.ones(2)] * 2, 0, ShapeMismatchError, "gather: the ranks' nests differ"),
        ({"a": [ONE]}, {"b": [ONE]}, 0, ShapeMismatchError, r"rank 1: \{'a': \[\*\]\}"),
    ],
)
def test_what_can_not_be_gathered(comm, strategy, there, elsewhere, axis, error, match):
    value = on_rank_1(strategy, there, elsewhere)
    same_refusal(comm, error, match, strategy.gather, value, axis)
    np.testing.assert_array_equal(strategy.gather(np.array([comm.rank]), 0), np.arange(comm.size))


@pytest.mark.ranks(2, 3)
def test_numbers_have_no_axis_to_be_gathered_along(comm, strategy):
    for value in (1.5, np.float32(comm.rank), {"a": np.ones(2), "b": np.array(3)}):
        arguments = (strategy.gather, value, 0)
        same_refusal(comm, ValueError, "at least one axis, not of shapes", *arguments)
        text = "all_gather takes arrays of at least one axis"
        refusal(ValueError, text, WAYS["all_gather"], strategy, value, 0)
    only_here = on_rank_1(strategy, np.array(3), np.ones(1))
    same_refusal(comm, ValueError, "rank 1: .* at least one axis", strategy.gather, only_here, 0)
    np.testing.assert_array_equal(strategy.gather(np.array([comm.rank]), 0), np.arange(comm.size))


@pytest.mark.ranks(2)
def test_ranks_that_gather_along_different_axes(comm, strategy):
    arguments = (strategy.gather, np.ones((2, 2)), comm.rank)
    text = same_refusal(comm, OpMismatchError, "gather: the ranks' arguments differ", *arguments)
    assert "rank 1: gather(axis=1)" in text


@in_both_ways
@pytest.mark.parametrize("axis", [None, 0.5, "0", [0]])
def test_gather_takes_one_axis(strategy, gather, axis):
    text = refusal(TypeError, "axis", gather, strategy, np.ones(2), axis)
    assert repr(axis) in text
    assert "must be" in text


# --- all_reduce inside `run` ---------------------------------------------------------------------


@pytest.mark.parametrize(("op", "share"), [("sum", 1), (ReduceOp.MEAN, None), ("Mean", None)])
def test_replicas_fold_a_nest(strategy, op, share):
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    divisor = share or size
    value = {"a": np.full((2, 2), rank, np.float32), "b": (np.int64(rank), 1.0)}
    result = inside(strategy, lambda replica: replica.all_reduce(op, value))
    total = size * (size - 1) / 2
    np.testing.assert_allclose(result["a"], np.full((2, 2), total / divisor), rtol=1e-6)
    assert result["a"].dtype == np.float32
    assert type(result["b"]) is tuple
    assert [float(each) for each in result["b"]] == [total / divisor, size / divisor]
    assert result["b"][0].dtype == (np.int64 if share else np.float64)


def test_inside_run_only_sum_and_mean_as_well(strategy):
    inside(
        strategy,
        lambda replica: refusal(ValueError, "reduce_op='max'", replica.all_reduce, "max", 1.0),
    )


def test_a_replicas_value_is_not_changed(strategy):
    value = np.ones(3)
    result = inside(strategy, lambda replica: replica.all_reduce("sum", [value]))[0]
    result += 1
    np.testing.assert_array_equal(value, np.ones(3))


def test_replicas_read_their_own_copies(strategy):
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = Variable([1.0, 2.0])
    result = inside(strategy, lambda replica: replica.all_reduce("sum", variable))
    np.testing.assert_array_equal(result, [size, 2 * size])


def test_local_results_are_this_ranks_own(strategy):
    value = object()
    assert strategy.experimental_local_results(value) == (value,)
    assert repr(strategy) == (
        f"<MultiWorkerMirroredStrategy replica {strategy.communicator.rank}"
        f" of {strategy.num_replicas_in_sync}>"
    )
