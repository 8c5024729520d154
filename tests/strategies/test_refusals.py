"""An error of one rank is the same error on all ranks, at once; the next call works."""

import time

import numpy as np
import pytest

from collectives import CollectiveMismatchError, MismatchError
from strategies import (
    CentralStorageStrategy,
    Checkpoint,
    LocalSGDStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
    metrics,
    optimizers,
)
from strategies.core.indexed_slices import IndexedSlices, embedding_lookup
from strategies.cross_device_ops import HierarchicalCopyAllReduce

pytestmark = pytest.mark.mpi

ROWS = IndexedSlices(np.ones((1, 2)), [0], (3, 2))

# Not three numbers; none of them can be sent.
WRONG = [None, "x", np.array([None] * 3), len, [[1, 2], [3]], np.array(["2020-01-01"], "M8[D]")]


def reduced(strategy, value):
    return strategy.reduce("SUM", value, axis=None)


def reduced_over_rows(strategy, value):
    return strategy.reduce("MEAN", value, axis=0)


def gathered(strategy, value):
    return strategy.gather(value, axis=0)


def reduced_by_replicas(strategy, value):
    return strategy.run(lambda: get_replica_context().all_reduce("SUM", value))


def reduced_in_a_list(strategy, value):
    return strategy.run(lambda: get_replica_context().all_reduce("SUM", [np.ones(3), value]))


def gathered_by_replicas(strategy, value):
    return strategy.run(lambda: get_replica_context().all_gather(value, axis=0))


def gathered_in_a_list(strategy, value):
    return strategy.run(lambda: get_replica_context().all_gather([np.ones(3), value], axis=0))


def batch_reduced(strategy, value):
    return strategy.extended.batch_reduce_to("SUM", [(np.ones(3), 0), (value, 0)])


def broadcast(strategy, value):
    return strategy.extended.broadcast_to(value, 0)


def by_axis(strategy, axis):
    return strategy.reduce("SUM", np.ones((3, 3)), axis=axis)


def gathered_by_axis(strategy, axis):
    return strategy.gather(np.ones((3, 3)), axis=axis)


def gathered_by_replicas_by_axis(strategy, axis):
    return strategy.run(lambda: get_replica_context().all_gather(np.ones((3, 3)), axis=axis))


def by_op(strategy, op):
    return strategy.reduce(op, np.ones(3), axis=None)


def by_op_of_replicas(strategy, op):
    return strategy.run(lambda: get_replica_context().all_reduce(op, np.ones(3)))


CALLS = [
    *(
        pytest.param(call, np.ones(3), value, id=f"{call.__name__}-{number}")
        for call in (
            reduced,
            reduced_over_rows,
            gathered,
            reduced_by_replicas,
            reduced_in_a_list,
            gathered_by_replicas,
            gathered_in_a_list,
            batch_reduced,
            broadcast,
        )
        for number, value in enumerate(WRONG)
    ),
    *(
        pytest.param(call, 0, axis, id=f"{call.__name__}-{axis}")
        for call in (by_axis, gathered_by_axis, gathered_by_replicas_by_axis)
        for axis in ([0], "0", 0.5, 5)
    ),
    *(
        pytest.param(call, "SUM", op, id=f"{call.__name__}-{op}")
        for call in (by_op, by_op_of_replicas)
        for op in ("MAX", None, "MEAN")
    ),
    *(
        pytest.param(call, np.ones(3), nest, id=f"{call.__name__}-{len(nest)}")
        for call in (gathered_by_replicas, gathered_in_a_list, reduced_by_replicas)
        for nest in ([], [np.ones(3)], {"a": np.ones(3), "b": np.ones(3)})
    ),
    *(
        pytest.param(call, np.ones(3), ROWS, id=f"{call.__name__}-rows")
        for call in (reduced, reduced_over_rows, gathered, gathered_by_replicas)
    ),
]


def same_error_at_once(strategy, function, *arguments):
    """As `same_error_at_once_of`, of the errors of ranks that differ."""
    return same_error_at_once_of((MismatchError, ValueError), strategy, function, *arguments)


def same_error_at_once_of(errors, strategy, function, *arguments):
    """The class and text of the error that all ranks raise, well before the deadline."""
    began = time.monotonic()
    with pytest.raises(errors) as caught:
        function(*arguments)
    took = time.monotonic() - began
    seen = strategy.communicator.all_gather_object((type(caught.value), str(caught.value)))
    assert len(set(seen)) == 1
    assert took < strategy.communicator.deadline / 4
    total = strategy.reduce("SUM", np.array(strategy.communicator.rank), axis=None)
    assert total == sum(range(strategy.communicator.size))
    return seen[0]


def last(strategy):
    return strategy.communicator.rank == strategy.communicator.size - 1


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("call", "right", "wrong"), CALLS)
def test_one_ranks_wrong_argument(strategy, call, right, wrong):
    _, text = same_error_at_once(strategy, call, strategy, wrong if last(strategy) else right)
    assert f"rank {strategy.communicator.size - 1}" in text


@pytest.mark.ranks(2, 3)
def test_the_others_get_the_cause_of_the_error(strategy):
    op = "MAX" if last(strategy) else "SUM"
    kind, text = same_error_at_once(strategy, by_op, strategy, op)
    size = strategy.communicator.size
    assert kind is CollectiveMismatchError
    assert f"rank {size - 1}: barrier(reduce refused by ValueError: reduce_op='MAX'" in text


# --- variables -----------------------------------------------------------------------------------


def hierarchical(*, communicator):
    return MirroredStrategy(cross_device_ops=HierarchicalCopyAllReduce(), communicator=communicator)


def local_sgd(*, communicator):
    return LocalSGDStrategy(sync_every=2, communicator=communicator)


every_strategy = pytest.mark.parametrize(
    "kind", [MultiWorkerMirroredStrategy, CentralStorageStrategy, hierarchical, local_sgd]
)
ASSIGNED = [None, np.ones(4), np.ones(3, complex), [[1.0], [2.0, 3.0]]]


@pytest.mark.ranks(2, 3)
@every_strategy
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub", "scatter_add"])
def test_one_ranks_wrong_operand_of_what_is_aggregated(comm, kind, method):
    strategy = kind(communicator=comm)
    rows = IndexedSlices(np.ones(1), [2])
    for aggregation in list(VariableAggregation)[1:]:
        with strategy.scope():
            variable = Variable(np.arange(3.0), aggregation=aggregation)
        for wrong in ASSIGNED:
            right = rows if method == "scatter_add" else np.ones(3)
            value = wrong if last(strategy) else right
            same_error_at_once(strategy, strategy.run, getattr(variable, method), [value])
        np.testing.assert_array_equal(variable, np.arange(3.0))
    strategy.communicator.close()


@pytest.mark.ranks(2, 3)
def test_one_ranks_wrong_operand_for_the_copy_of_a_node(comm):
    strategy = CentralStorageStrategy(communicator=comm)
    with strategy.scope():
        variable = Variable(np.arange(3.0))
    for wrong in ASSIGNED:
        value = wrong if last(strategy) else np.ones(3)
        same_error_at_once(strategy, variable.assign, value)
    np.testing.assert_array_equal(variable, np.arange(3.0))
    strategy.communicator.close()


@pytest.mark.ranks(2, 3)
def test_a_copy_without_waiting_ranks_is_refused_locally(strategy):
    with strategy.scope():
        plain = Variable(np.arange(3.0))
        own = Variable(
            np.arange(3.0),
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
    if last(strategy):
        with pytest.raises(ValueError, match="value has shape"):
            plain.assign(np.ones(4))
        with pytest.raises(ValueError, match="value has shape"):
            strategy.run(own.assign, [np.ones(4)])
    size = strategy.communicator.size
    np.testing.assert_array_equal(own.numpy(), size * np.arange(3.0))


@pytest.mark.ranks(2, 3)
@every_strategy
def test_one_ranks_wrong_initial_value(comm, kind):
    strategy = kind(communicator=comm)

    def made(value, synchronization=VariableSynchronization.AUTO):
        with strategy.scope():
            Variable(value, synchronization=synchronization)

    def failing():
        raise KeyError("no such weights")

    for wrong in ("x", [[1.0], [2.0, 3.0]], failing):
        same_error_at_once(strategy, made, wrong if last(strategy) else np.ones(3))
    none = VariableSynchronization.NONE if last(strategy) else VariableSynchronization.AUTO
    same_error_at_once(strategy, made, np.ones(3), none)
    strategy.communicator.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "kind", [MultiWorkerMirroredStrategy, CentralStorageStrategy, hierarchical]
)
def test_one_ranks_wrong_gradient(comm, kind):
    strategy = kind(communicator=comm)
    with strategy.scope():
        variable, optimizer = Variable(np.arange(3.0)), optimizers.SGD(1.0)

    def step(gradient):
        optimizer.apply_gradients([(gradient, variable)])

    for wrong in (None, np.ones(4), "x", IndexedSlices(np.ones(1), [7])):
        value = wrong if last(strategy) else np.ones(3)
        same_error_at_once(strategy, strategy.run, step, [value])
    strategy.run(step, [np.ones(3)])
    np.testing.assert_array_equal(variable, np.arange(3.0) - comm.size)
    strategy.communicator.close()


def refuse_by_itself(message):
    raise RuntimeError(message)


@pytest.mark.ranks(2, 3)
def test_one_ranks_own_runtime_error(strategy):
    """As torch raises them, or a schedule that reads a file; no rank does the step."""
    size = strategy.communicator.size
    with strategy.scope():
        variable, optimizer = Variable(np.zeros(1)), optimizers.SGD(1.0)

    def pairs(failing):
        yield np.ones(1), variable
        if failing:
            refuse_by_itself("no more gradients")

    def step(failing):
        optimizer.apply_gradients(pairs(failing))

    text = same_error_at_once(strategy, strategy.run, step, [last(strategy)])[1]
    refused = "barrier(apply_gradients refused by RuntimeError"
    assert f"rank {size - 1}: {refused}: no more gradients" in text
    fails = last(strategy)
    optimizer.learning_rate = lambda step: refuse_by_itself("no file") if fails else 1.0
    text = same_error_at_once(strategy, strategy.run, step, [False])[1]
    assert f"rank {size - 1}: {refused}: no file" in text
    assert optimizer.iterations == 0
    np.testing.assert_array_equal(variable, [0.0])


@pytest.mark.ranks(2)
def test_errors_of_all_ranks_and_unsendable_ones_are_raised_unchanged(comm):
    strategy = MultiWorkerMirroredStrategy(communicator=comm)

    def in_a_scope():
        strategy.scope()

    with strategy.scope():
        variable = Variable(np.zeros(1))

    def step():
        optimizers.SGD(lambda number: in_a_scope()).apply_gradients([(np.ones(1), variable)])

    kind, text = same_error_at_once_of(RuntimeError, strategy, strategy.run, step)
    assert not issubclass(kind, MismatchError)
    assert "requires a cross-replica context" in text
    strategy.communicator.close()
    with pytest.raises(RuntimeError, match="the communicator is closed"):
        strategy.reduce("SUM", [np.ones(1)], axis=None)
    with pytest.raises(TypeError, match="must be None, an integer"):
        strategy.reduce("SUM", [np.ones(1), len], axis=object())


# --- rows of larger arrays -----------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_rows_are_reduced_to_rows(strategy, op):
    rank, size = strategy.communicator.rank, strategy.communicator.size
    own = IndexedSlices(np.full((rank + 1, 2), rank + 1.0), [rank] * (rank + 1), (size, 2))
    found = strategy.reduce(op, {"dense": np.array(rank), "rows": own}, axis=None)
    expected = np.array([[r + 1.0] * 2 for r in range(size) for _ in range(r + 1)])
    scale = size if op == "MEAN" else 1
    np.testing.assert_allclose(found["rows"].values, expected / scale)
    rows = [r for r in range(size) for _ in range(r + 1)]
    np.testing.assert_array_equal(found["rows"].indices, rows)
    assert found["rows"].dense_shape == (size, 2)
    assert found["dense"] == sum(range(size)) / scale


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("call", [reduced_over_rows, gathered, gathered_by_replicas])
def test_what_rows_do_not_have_is_refused(strategy, call):
    with pytest.raises(NotImplementedError, match=r"IndexedSlices.*to_dense"):
        call(strategy, ROWS)


@pytest.mark.ranks(2, 3)
def test_rows_of_arrays_of_other_shapes_do_not_fit(strategy):
    shape = (4, 2) if last(strategy) else (3, 2)
    own = IndexedSlices(np.ones((1, 2)), [0], shape)
    _, text = same_error_at_once(strategy, reduced, strategy, own)
    assert "rows of (4, 2)" in text


# --- checkpoints, metrics, clusters --------------------------------------------------------------


class Stateless:
    """An object without attributes."""


@pytest.mark.ranks(2, 3)
def test_one_ranks_wrong_checkpoint(strategy, tmp_path):
    with strategy.scope():
        variable = Variable(1.0)
        held = Stateless() if last(strategy) else [variable]
        checkpoint = Checkpoint(variable=variable, more=held)
    path = strategy.communicator.broadcast_object(str(tmp_path / "saved"))
    _, text = same_error_at_once(strategy, checkpoint.save, path)
    assert "more is a Stateless without state" in text


@pytest.mark.ranks(2, 3)
def test_only_rank_0s_path_is_used(strategy, tmp_path):
    with strategy.scope():
        checkpoint = Checkpoint(variable=Variable(2.0))
    rank = strategy.communicator.rank
    written = checkpoint.save(str(tmp_path / "saved") if rank == 0 else None)
    assert written.endswith("saved.safetensors")
    kind, _ = same_error_at_once_of(TypeError, strategy, checkpoint.save, None if rank == 0 else "")
    assert kind is TypeError


@pytest.mark.ranks(2, 3)
def test_one_ranks_wrong_row_of_an_aggregate(strategy):
    with strategy.scope():
        variable = Variable(
            np.arange(3.0),
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.MEAN,
        )
    same_error_at_once(strategy, variable.sparse_read, [3 if last(strategy) else 0])
    same_error_at_once(strategy, embedding_lookup, variable, [0.5 if last(strategy) else 0])
    np.testing.assert_array_equal(variable.sparse_read([2]), [2.0])


@pytest.mark.ranks(2, 3)
def test_one_ranks_wrong_variable_for_gradient_views(strategy):
    with strategy.scope():
        variable, optimizer = Variable(np.zeros(3)), optimizers.SGD(1.0)
    for wrong in ([], [variable, np.zeros(3)]):
        with strategy.scope():
            given = wrong if last(strategy) else [variable, variable]
            same_error_at_once(strategy, optimizer.gradient_views, given)
    same_error_at_once(
        strategy, optimizer.gradient_views, [variable, None] if last(strategy) else [variable]
    )


@pytest.mark.ranks(2, 3)
def test_one_ranks_wrong_pairs_of_a_batch(strategy):
    pairs = [np.ones(3)] if last(strategy) else [(np.ones(3), 0)]
    same_error_at_once(strategy, strategy.extended.batch_reduce_to, "SUM", pairs)


@pytest.mark.ranks(2, 3)
def test_one_ranks_wrong_metric(strategy):
    def made():
        with strategy.scope():
            metrics.Mean("loss", dtype="nonsense" if last(strategy) else np.float32)

    same_error_at_once(strategy, made)


@pytest.mark.ranks(2, 3)
def test_one_ranks_wrong_resolver(comm, strategy):
    resolver = 5 if last(strategy) else None
    with pytest.raises(CollectiveMismatchError, match="cluster_resolver refused by") as caught:
        MultiWorkerMirroredStrategy(resolver, communicator=comm)
    assert set(comm.all_gather_object(str(caught.value))) == {str(caught.value)}
    assert comm.all_reduce(np.array(1)) == comm.size
