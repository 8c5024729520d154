"""Metrics: Keras' numbers, and the same ones on every rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as draw

from collectives import MismatchError
from strategies import Variable, VariableAggregation, VariableSynchronization, metrics
from tests.strategies.support import as_replicas, lone_strategy, on_ranks, refusal, same_refusal


def updated(metric, *batches):
    for batch in batches:
        metric.update_state(*batch)
    return float(metric.result())


# --- one process: Keras 3's numbers --------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([], 0.0),
        ([([],)], 0.0),
        ([(4.0,)], 4.0),
        ([([1, 3, 5, 7],)], 4.0),
        ([([1, 3, 5, 7], [1, 1, 0, 0])], 2.0),
        ([([1, 3], [0.5, 0.5]), ([8],)], 5.0),
        # One weight for all makes one sample of the batch.
        ([([1, 3], 0.5), ([8],)], 6.0),
        ([([1, 3], np.float32(0.5)), ([8],)], 6.0),
        ([([], 2.0), ([8], 3)], 8.0),
        ([(3.0, 2.0), (9.0,)], 5.0),
        ([([1, 2], 0)], 0.0),
        # A sample of more axes counts once, with its mean.
        ([([[1, 2, 3], [5, 6, 7]],), ([10],)], 6.0),
        ([([[1, 3], [5, 7]], [1, 3])], 5.0),
        ([([[1, 3], [5, 7]], [[1, 0], [0, 1]])], 4.0),
        ([([[1], [3]], [[3], [1]])], 1.5),
        ([(np.zeros((2, 0)),), ([7.0],)], 7.0),
        ([([np.nan, 1],)], np.nan),
    ],
)
def test_the_mean(batches, expected):
    assert updated(metrics.Mean(), *batches) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([], 0.0),
        ([([],), (2,)], 2.0),
        ([([1, 3, 5, 7],), (-1.5,)], 14.5),
        ([([1, 3, 5, 7], [1, 1, 0, 0])], 4.0),
        ([([[1, 2], [3, 4]], [10, 1])], 37.0),
        ([([[1, 2], [3, 4]], 2)], 20.0),
    ],
)
def test_the_sum(batches, expected):
    assert updated(metrics.Sum(), *batches) == expected


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([([1, 2, 3, 4], [0, 2, 3, 4])], 0.75),
        ([([1, 2, 3, 4], [0, 2, 3, 4], [1, 1, 0, 0])], 0.5),
        ([([[1], [2]], [1, 0])], 0.5),
        ([([1, 2], [[1], [2]])], 1.0),
        ([([[1, 2], [3, 4]], [[1, 2], [3, 0]])], 0.75),
        ([([], [])], 0.0),
        ([([1, 2], [1, 0], 3), ([1], [1])], 0.625),
        ([(1, 1), (1, 0), (0, 0)], 2 / 3),
    ],
)
def test_the_accuracy(batches, expected):
    assert updated(metrics.Accuracy(), *batches) == pytest.approx(expected)


LOGITS = [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0], [9, -9, 0]]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([([2, 1, 0], LOGITS)], 2 / 3),
        ([([[2], [1], [0]], LOGITS)], 2 / 3),
        ([([2, 1, 0], LOGITS, [0.7, 0.3, 0])], 0.3),
        ([([], np.zeros((0, 3)))], 0.0),
        ([([0, 1], [[1, 1], [1, 1]])], 0.5),
        ([([[1, 0]], [[[0, 1], [1, 0]]])], 1.0),
    ],
)
def test_the_sparse_categorical_accuracy(batches, expected):
    assert updated(metrics.SparseCategoricalAccuracy(), *batches) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "arguments", "match"),
    [
        (metrics.Mean, ([1, 2, 3], [1, 2]), r"sample_weight has shape \(2,\)"),
        (metrics.Sum, ([1, 2, 3], [1, 2]), r"sample_weight has shape \(2,\)"),
        (metrics.Accuracy, ([1, 2], [1, 2, 3]), r"shapes \(2,\) and \(3,\)"),
        (metrics.Accuracy, ([1], 1.0), None),
        (metrics.SparseCategoricalAccuracy, ([1, 2], [1, 2]), r"shapes \(2,\) and \(\)"),
        (metrics.SparseCategoricalAccuracy, ([1], 5.0), r"have shape \(\)"),
        (metrics.SparseCategoricalAccuracy, ([], np.zeros((0, 0))), r"have shape \(0, 0\)"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(metric, arguments, match):
    made = metric()
    if match is None:
        made.update_state(*arguments)
        assert made.result() == 1.0
    else:
        refusal(ValueError, match, made.update_state, *arguments)
        assert [float(each) for each in made.variables] == [0.0] * len(made.variables)


@pytest.mark.parametrize("reset", ["reset_state", "reset_states"])
def test_reset_clears_the_state(reset):
    metric = metrics.Mean()
    assert metric([2, 4]) == 3.0
    getattr(metric, reset)()
    assert metric.result() == 0.0
    assert metric(7) == 7.0


def test_a_call_updates_and_gives_the_result():
    accuracy = metrics.SparseCategoricalAccuracy()
    assert accuracy([1], [[0, 1]]) == 1.0
    assert accuracy([0], [[0, 1]], sample_weight=3) == 0.25


def test_the_dtype_is_that_of_the_result_and_float32_by_default():
    assert metrics.Mean()(1 / 3) == np.float32(1 / 3)
    assert metrics.Mean().result().dtype == np.float32
    assert metrics.Sum(dtype="float64")(0.1).dtype == np.float64
    assert metrics.Accuracy(dtype=np.float16).result().dtype == np.float16
    assert metrics.Sum(dtype=np.float16)(1e6) == np.inf


def test_sums_are_kept_as_float64():
    mean = metrics.Mean()
    mean.count.assign(2.0**24)
    mean.update_state([0.0, 0.0, 0.0])
    assert float(mean.count) == 2**24 + 3
    assert updated(metrics.Sum(dtype=np.float64), *[(0.1,)] * 1000) == pytest.approx(100, abs=1e-9)


def test_names_and_variables():
    assert metrics.Mean(name="test_loss").name == "test_loss"
    assert (metrics.Accuracy().name, metrics.Sum().name) == ("accuracy", "sum")
    mean = metrics.Mean("loss")
    assert [each.name for each in mean.variables] == ["loss/total", "loss/count"]
    assert len(metrics.Sum().variables) == 1
    for variable in mean.variables:
        assert isinstance(variable, Variable)
        assert variable.synchronization is VariableSynchronization.ON_READ
        assert variable.aggregation is VariableAggregation.SUM
        assert not variable.trainable
    assert repr(mean) == "<Mean 'loss'>"


numbers = draw.floats(-1e6, 1e6)
weighted = draw.lists(draw.tuples(numbers, draw.floats(0, 10)), max_size=20)


@given(draw.lists(weighted, max_size=5))
def test_how_the_samples_are_batched_does_not_matter(batches):
    mean, total = metrics.Mean(dtype=np.float64), metrics.Sum(dtype=np.float64)
    for batch in batches:
        values, weights = np.array(batch).reshape(-1, 2).T
        mean.update_state(values, weights)
        total.update_state(values, weights)
    values, weights = np.array([each for batch in batches for each in batch]).reshape(-1, 2).T
    assert total.result() == pytest.approx((values * weights).sum(), rel=1e-9, abs=1e-3)
    wanted = np.average(values, weights=weights) if weights.sum() > 1e-3 else mean.result()
    assert mean.result() == pytest.approx(wanted, rel=1e-9, abs=1e-3)


# --- between ranks -------------------------------------------------------------------------------


def batch_of(rank):
    """Batches that differ in length and value; rank 1 has none."""
    length = 0 if rank == 1 else 2 * rank + 3
    return 10.0 * rank + np.arange(length)


def all_batches(size):
    return np.concatenate([batch_of(rank) for rank in range(size)])


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3, 5)
def test_results_are_those_of_all_ranks_outside_of_run_and_the_replicas_own_inside(comm, strategy):
    with strategy.scope():
        mean, total = metrics.Mean(), metrics.Sum()
    own = batch_of(comm.rank)

    def step():
        total(own)
        return mean(own), total.result()

    for times in (1, 2):
        own_mean, own_sum = strategy.run(step)
        assert own_mean == pytest.approx(own.mean() if own.size else 0.0)
        assert own_sum == times * own.sum()
        assert mean.result() == pytest.approx(all_batches(comm.size).mean())
        assert total.result() == pytest.approx(times * all_batches(comm.size).sum())
        assert len(set(comm.all_gather_object(float(mean.result())))) == 1


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("inside_the_scope", [True, False])
def test_accuracies_over_uneven_batches(comm, strategy, inside_the_scope):
    with strategy.scope():
        plain, sparse = metrics.Accuracy(), metrics.SparseCategoricalAccuracy()
    labels = np.arange(comm.rank + 1)
    guesses = np.zeros(comm.rank + 1, int)
    strategy.run(plain.update_state, (labels, guesses))
    strategy.run(sparse.update_state, (labels, np.eye(comm.size + 1)[guesses]))

    def results():
        return plain.result(), sparse.result()

    if inside_the_scope:
        with strategy.scope():
            seen = results()
    else:
        seen = results()
    # Each rank has one correct example, out of 1, 2, 3, …
    expected = comm.size / (comm.size * (comm.size + 1) / 2)
    assert seen == pytest.approx((expected, expected))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_reset_between_ranks(comm, strategy):
    with strategy.scope():
        mean = metrics.Mean()
    strategy.run(mean.update_state, (comm.rank,))
    mean.reset_state()
    assert mean.result() == 0.0
    strategy.run(mean.update_state, (comm.rank + 1.0,))
    assert mean.result() == pytest.approx((comm.size + 1) / 2)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_metrics_of_other_dtypes_or_classes_are_refused_on_every_rank(comm, strategy):
    """Their results would differ between the ranks."""
    with strategy.scope():
        for kind, dtype in (
            (metrics.Sum, np.float16 if comm.rank else np.float32),
            (metrics.Sum if comm.rank else metrics.Mean, np.float32),
        ):
            with pytest.raises(MismatchError, match="metric 'm', Sum of float"):
                kind("m", dtype)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_an_update_outside_of_run_is_refused_on_every_rank(comm, strategy):
    with strategy.scope():
        mean = metrics.Mean()
    same_refusal(comm, ValueError, "outside of `run` has no meaning", mean.update_state, 1.0)
    assert strategy.run(mean, (comm.rank,)) == comm.rank
    assert mean.result() == pytest.approx((comm.size - 1) / 2)


@pytest.mark.parametrize("size", [2, 3])
def test_a_metric_outside_of_every_scope_belongs_to_the_process(size):
    def body(strategy, rank):
        with pytest.raises(RuntimeError, match="create it in that strategy's scope"):
            mean_of[rank](rank + 1.0)

    mean_of = [metrics.Mean() for _ in range(size)]
    as_replicas(size, body)
    assert [float(mean(rank + 1.0)) for rank, mean in enumerate(mean_of)] == list(
        range(1, size + 1)
    )


def test_one_replica():
    strategy = lone_strategy()
    with strategy.scope():
        mean = metrics.Mean()
    strategy.run(mean.update_state, ([1, 2, 6],))
    assert mean.result() == 3.0


@pytest.mark.parametrize("size", [2, 3])
def test_threads_as_ranks_agree(size):
    def body(strategy):
        with strategy.scope():
            mean = metrics.Mean(dtype=np.float64)
        strategy.run(mean.update_state, (batch_of(strategy.communicator.rank),))
        return float(mean.result())

    results = on_ranks(size, body)
    assert results == [pytest.approx(all_batches(size).mean())] * size
    assert len(set(results)) == 1
