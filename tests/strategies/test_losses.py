"""Losses scaled for summed gradients: §2.2 of tf_semantics.md."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import compute_average_loss, scale_regularization_loss
from tests.strategies.support import as_replicas, lone_strategy, on_ranks, refusal

PARTIAL = ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0])


def total_of(size, function):
    """The sum over the replicas of the function's results."""

    def replica(strategy, rank):
        return function(rank)

    return sum(as_replicas(size, replica))


# --- compute_average_loss ------------------------------------------------------------------------


def test_a_partial_batch_needs_the_true_global_batch_size():
    assert total_of(2, lambda rank: compute_average_loss(PARTIAL[rank])) == 3.0
    given_size = total_of(2, lambda rank: compute_average_loss(PARTIAL[rank], global_batch_size=6))
    assert given_size == 2.5


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_default_size_is_the_replicas_times_their_number(size):
    assert total_of(size, lambda rank: compute_average_loss([rank, 2.0, 4.0 - rank])) == 2.0


def test_the_default_strategy_is_one_replica():
    assert compute_average_loss([1.0, 2.0, 6.0]) == 3.0
    assert scale_regularization_loss([1.0, 2.0]) == 3.0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_the_dtype_of_the_losses_is_kept(dtype):
    losses = np.array([1, 2, 6], dtype)
    for loss in (
        compute_average_loss(losses),
        compute_average_loss(losses, np.array([1.0, 1.0, 1.0]), np.int64(3)),
        compute_average_loss(losses[:0]),
        compute_average_loss(losses[:0], global_batch_size=4),
    ):
        assert loss.dtype == dtype
        assert loss in (0, 3)
    assert scale_regularization_loss(losses).dtype == dtype


def test_integer_losses_are_averaged_too():
    assert compute_average_loss([1, 2]) == 1.5
    assert compute_average_loss([2, 4], [0.5, 0.25]) == 1.0


@pytest.mark.parametrize(
    ("losses", "total"),
    [
        (np.array([True, True, False]), 2.0),
        (np.array([100, 100, 100], np.int8), 300.0),
        (np.array([60000, 20000], np.uint16), 80000.0),
    ],
)
def test_sums_of_small_numbers_do_not_overflow(losses, total):
    mean = compute_average_loss(losses, 2, global_batch_size=300)
    assert (mean, mean.dtype) == (2 * total / 300, np.float64)
    loss = scale_regularization_loss(losses)
    assert (loss, loss.dtype) == (total, np.float64)


def test_sums_of_half_precision_do_not_overflow():
    assert compute_average_loss(np.ones(70000, np.float16)) == 1.0


@pytest.mark.parametrize("size", [0, 4, None])
def test_an_empty_batch_has_loss_zero(size):
    assert compute_average_loss(np.zeros((0,)), global_batch_size=size) == 0
    assert compute_average_loss(np.zeros((0, 3)), np.zeros(0), size) == 0


def test_a_global_batch_without_examples_has_loss_zero():
    assert compute_average_loss([1.0, 2.0], global_batch_size=0) == 0


LOSSES = np.array([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    ("losses", "weights", "expected"),
    [
        ([1.0, 2.0, 3.0], [3.0, 0.0, 1.0], 2.0),
        ([1.0, 2.0, 3.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], [[3.0], [0.0], [1.0]], 2.0),
        ([[1.0], [2.0], [3.0]], [3.0, 0.0, 1.0], 2.0),
        (LOSSES, [10.0, 1.0], 18.5),
        (LOSSES, [[10.0], [1.0]], 18.5),
        (LOSSES, [[1.0, 2.0], [3.0, 4.0]], 15.0),
        (LOSSES, [[10.0, 1.0]], 23.0),
    ],
)
def test_weights_belong_to_the_examples(losses, weights, expected):
    assert compute_average_loss(losses, sample_weight=weights) == expected
    assert compute_average_loss(losses, weights, 2 * len(losses)) == expected / 2


@pytest.mark.parametrize("weights", [[1.0, 2.0], np.ones((3, 2)), np.ones((1, 3, 3)), []])
def test_weights_that_do_not_fit(weights):
    text = refusal(ValueError, "sample_weight", compute_average_loss, [1.0, 2.0, 3.0], weights)
    assert f"has shape {np.shape(weights)}" in text
    assert "losses, (3,)" in text
    refusal(ValueError, "sample_weight has shape", compute_average_loss, [1.0], [1.0, 2.0])


def test_losses_need_an_axis():
    refusal(ValueError, "per_example_loss is a single number", compute_average_loss, 3.0)


@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        (-1, ValueError, "global_batch_size=-1: must be an integer of at least 0"),
        (2.0, TypeError, "global_batch_size=2.0: must be an integer"),
        ("2", TypeError, "global_batch_size='2': must be an integer"),
    ],
)
def test_what_a_global_batch_size_may_be(size, error, match):
    refusal(error, match, compute_average_loss, [1.0], global_batch_size=size)


# --- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_regularization_loss_counts_once(size):
    losses = [0.25, [1.5, 2.0], np.float32(0.5)]
    for loss in losses:
        total = total_of(size, lambda rank, loss=loss: scale_regularization_loss(loss))
        assert total == pytest.approx(np.sum(loss), rel=1e-6)


@pytest.mark.parametrize("function", [compute_average_loss, scale_regularization_loss])
def test_losses_are_a_replicas_business(function):
    strategy = lone_strategy()
    match = f"{function.__name__} must be called as a replica, inside `run`"
    with strategy.scope():
        refusal(RuntimeError, match, function, [1.0])
    assert strategy.run(function, ([1.0],)) == 1.0


@given(
    st.lists(st.lists(st.integers(-8, 8), max_size=5), min_size=1, max_size=4).filter(any),
)
def test_summed_over_the_replicas_it_is_the_mean_over_the_batch(parts):
    batch = sum(map(len, parts))

    def body(strategy):
        mine = np.array(parts[strategy.communicator.rank], np.float64)
        loss = strategy.run(compute_average_loss, (mine,), {"global_batch_size": batch})
        return strategy.reduce("sum", loss, axis=None)

    expected = np.concatenate([np.array(part, np.float64) for part in parts]).mean()
    for result in on_ranks(len(parts), body):
        assert result == pytest.approx(expected, abs=1e-12)
