"""Ranks whose steps differ although all shapes are equal."""

import numpy as np
import pytest

from collectives import CollectiveMismatchError, MismatchError, OpMismatchError
from strategies import (
    Checkpoint,
    LocalSGDStrategy,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
    metrics,
    optimizers,
)
from strategies.core.indexed_slices import IndexedSlices
from strategies.synchronous.central_storage import CentralStorageStrategy
from strategies.synchronous.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy
from tests.strategies.support import refusal

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

IN_STEP = [MirroredStrategy, MultiWorkerMirroredStrategy, CentralStorageStrategy]


@pytest.fixture(params=IN_STEP, ids=lambda kind: kind.__name__)
def trained(request, comm):
    """A strategy, two variables of one shape, and an optimizer."""
    strategy = request.param(communicator=comm)
    with strategy.scope():
        pair = [Variable(np.zeros(3)), Variable(np.zeros(3))]
    yield strategy, pair, optimizers.SGD(1.0)
    strategy.communicator.close()


def rows():
    return IndexedSlices(np.full(1, 100.0), [0])


def another_order(optimizer, gradients, first, second):
    return zip(reversed(gradients), (second, first), strict=True)


def another_one_lacks(optimizer, gradients, first, second):
    return [(gradients[0], first), (None, second)]


def another_one_is_sparse(optimizer, gradients, first, second):
    return [(gradients[0], first), (rows(), second)]


def another_learning_rate(optimizer, gradients, first, second):
    optimizer.learning_rate = 2.0
    return zip(gradients, (first, second), strict=True)


def another_number_of_steps(optimizer, gradients, first, second):
    optimizer.iterations = 7
    return zip(gradients, (first, second), strict=True)


def all_ranks(optimizer, gradients, first, second):
    """The other ranks' step, which has the same shapes."""
    return zip(gradients, (first, second), strict=True)


OTHERS = {
    another_order: all_ranks,
    another_one_lacks: lambda optimizer, gradients, *pair: zip(
        (None, gradients[1]), pair, strict=True
    ),
    another_one_is_sparse: lambda optimizer, gradients, *pair: zip(
        (rows(), gradients[1]), pair, strict=True
    ),
    another_learning_rate: all_ranks,
    another_number_of_steps: all_ranks,
}


@pytest.mark.parametrize("last", OTHERS, ids=lambda case: case.__name__)
def test_a_rank_that_would_take_another_step_is_refused_on_all(trained, last):
    strategy, pair, optimizer = trained
    rank, size = strategy.communicator.rank, strategy.communicator.size
    gradients = [np.full(3, rank + 1.0), np.full(3, 10.0 * (rank + 1))]

    def step(case):
        optimizer.apply_gradients(case(optimizer, gradients, *pair))

    case = last if rank == size - 1 else OTHERS[last]
    text = refusal(MismatchError, rf"(?s)rank 0: .*rank {size - 1}: ", strategy.run, step, (case,))
    assert set(strategy.communicator.all_gather_object(text)) == {text}
    assert not np.any([variable.numpy() for variable in pair])
    optimizer.learning_rate, optimizer.iterations = 1.0, 0
    strategy.run(step, (all_ranks,))
    total = size * (size + 1) / 2
    np.testing.assert_array_equal(pair[0], [-total] * 3)
    np.testing.assert_array_equal(pair[1], [-10 * total] * 3)


@pytest.mark.parametrize("kind", [*IN_STEP, LocalSGDStrategy], ids=lambda kind: kind.__name__)
def test_variables_of_other_names_are_refused(comm, kind):
    """Nests of one shape could be confused."""
    strategy = (
        kind(sync_every=1, communicator=comm)
        if kind is LocalSGDStrategy
        else kind(communicator=comm)
    )
    name = "left" if strategy.communicator.rank == 0 else "right"
    with strategy.scope():
        text = refusal(
            MismatchError, r"rank 0: barrier\(Variable 'left'\)", Variable, np.ones(3), name=name
        )
        assert set(strategy.communicator.all_gather_object(text)) == {text}
        assert Variable(np.ones(3), name="left").number == 0
    strategy.communicator.close()


def test_nests_that_differ_are_refused_before_anything_is_reduced(strategy):
    rank, size = strategy.communicator.rank, strategy.communicator.size
    last = rank == size - 1
    array, sparse = np.full(1, rank + 1.0), IndexedSlices(np.full(1, 1.0), [0], (1,))

    def reduce(value):
        return get_replica_context().all_reduce("SUM", value)

    for value in ({"b" if last else "a": array}, [sparse, array] if last else [array, sparse]):
        text = refusal(MismatchError, "all_reduce of", strategy.run, reduce, (value,))
        assert set(strategy.communicator.all_gather_object(text)) == {text}
    np.testing.assert_array_equal(strategy.run(reduce, ([array],)), [[size * (size + 1) / 2]])


def test_averaging_at_the_end_of_training_is_no_end_of_a_round(comm):
    strategy = LocalSGDStrategy(sync_every=2, communicator=comm)
    last = strategy.communicator.rank == strategy.communicator.size - 1
    with strategy.scope():
        variable, optimizer = Variable(0.0), optimizers.SGD(1.0)

    def step():
        optimizer.apply_gradients([(np.array(1.0), variable)])

    strategy.run(step)
    refusal(
        MismatchError,
        r"(?s)barrier\(the end of a round\).*barrier\(synchronize\)",
        *([strategy.synchronize] if last else [strategy.run, step]),
    )
    strategy.synchronize()
    size = strategy.communicator.size
    assert float(variable) == pytest.approx(-(2 * size - 1) / size)
    strategy.communicator.close()


def test_other_variables_and_methods_are_refused_within_run(comm):
    strategy = MultiWorkerMirroredStrategy(communicator=comm)
    how = {"aggregation": VariableAggregation.SUM}
    with strategy.scope():
        pair = [Variable(np.ones((2, 1)), **how) for _ in range(2)]
    odd, rows = comm.rank == 1, IndexedSlices(np.ones((1, 1)), [0])
    calls = (
        lambda: pair[odd].assign(np.ones((2, 1))),
        lambda: (pair[0].assign_add if odd else pair[0].assign_sub)(np.ones((2, 1))),
        lambda: (pair[0].scatter_add if odd else pair[0].scatter_sub)(rows),
    )
    for call in calls:
        refusal(MismatchError, "different arguments", strategy.run, call)
    strategy.run(lambda: pair[1].assign(np.ones((2, 1))))
    found = [each.numpy().ravel().tolist() for each in pair]
    assert found == [[1.0, 1.0], [comm.size] * 2]


@pytest.mark.parametrize("kind", IN_STEP, ids=lambda kind: kind.__name__)
def test_variables_of_other_rules_are_refused(comm, kind):
    strategy, odd = kind(communicator=comm), comm.rank == 1
    total, mean = VariableAggregation.SUM, VariableAggregation.MEAN
    on_read = VariableSynchronization.ON_READ
    for rules in (
        {"aggregation": total if odd else mean},
        {"aggregation": total if odd else VariableAggregation.NONE},
        {"trainable": odd},
        {"aggregation": total, "synchronization": on_read if odd else VariableSynchronization.AUTO},
    ):
        with strategy.scope():
            refusal(MismatchError, "different arguments", Variable, np.ones(2, int), **rules)
    strategy.communicator.close()


@pytest.mark.parametrize("kind", IN_STEP, ids=lambda kind: kind.__name__)
def test_a_change_that_fails_fails_on_all_ranks(comm, kind):
    strategy = kind(communicator=comm)
    with strategy.scope():
        flag, number = Variable(np.array([True, False])), Variable(np.ones(2))
    zero = IndexedSlices(np.array([0.0]), [1])
    for error, change, operand in (
        (TypeError, flag.assign_sub, np.array([True, True])),
        (FloatingPointError, number.scatter_div, zero),
    ):
        with np.errstate(all="raise"):
            text = refusal(error, "subtract|divide", change, operand)
        assert set(strategy.communicator.all_gather_object(text)) == {text}
    number.assign([5.0, 6.0])
    np.testing.assert_array_equal(number, [5.0, 6.0])
    strategy.communicator.close()


def test_users_calls_are_named(comm, tmp_path):
    """The check covers more than the collectives that the calls consist of."""
    strategy = MultiWorkerMirroredStrategy(communicator=comm)
    with strategy.scope():
        mean = metrics.Mean()
    data = strategy.experimental_distribute_dataset([np.ones((4, 1))])
    calls = {
        "all_reduce(sum, float64[], agreeing on reduce(SUM, axis=None)": lambda: strategy.reduce(
            "sum", 1.0, axis=None
        ),
        "barrier(agreeing on gather(axis=0)": lambda: strategy.gather(np.ones(2), axis=0),
        "the next batch of a distributed dataset: all_reduce(max": lambda: next(iter(data)),
        "Checkpoint.save, a call for every rank: ": lambda: Checkpoint(m=mean).save(tmp_path / "c"),
        "metric 'mean': barrier(read of variable": mean.result,
    }
    for name, call in calls.items():
        ranks_differ = strategy.communicator.broadcast if comm.rank else call
        arguments = (np.zeros(1),) if comm.rank else ()
        text = refusal(CollectiveMismatchError, "different collectives", ranks_differ, *arguments)
        assert f"rank 0: {name}" in text
        assert "rank 1: broadcast(" in text
    reduces = comm.rank == 0
    text = refusal(
        OpMismatchError,
        "the ranks' calls differ",
        *((strategy.reduce, "sum") if reduces else (strategy.gather,)),
        np.ones(2),
        axis=0,
    )
    assert "rank 0: reduce(SUM, axis=(0,))" in text
    assert "rank 1: gather(axis=0)" in text
    strategy.communicator.close()
