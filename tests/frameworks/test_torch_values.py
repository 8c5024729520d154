"""Tensors of torch as values that a strategy reduces and gathers."""

import time

import numpy as np
import pytest

from collectives import MismatchError
from strategies import (
    MultiWorkerMirroredStrategy,
    Variable,
    compute_average_loss,
    metrics,
    optimizers,
    scale_regularization_loss,
)
from strategies.core.indexed_slices import IndexedSlices
from strategies.input import make_numpy_dataset
from tests.strategies.support import lone_strategy

CALLS = {
    "a sum": (lambda strategy, value: strategy.reduce("SUM", value, axis=None), 3.0),
    "a sum over an axis": (lambda strategy, value: strategy.reduce("SUM", value, axis=0), 12.0),
    "a nest": (lambda strategy, value: strategy.reduce("SUM", [value, value], axis=None)[1], 3.0),
    "gathered": (lambda strategy, value: strategy.gather(value, axis=0).sum(), 12.0),
}


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", CALLS)
def test_tensors_are_reduced_and_their_storages_stay_resizable(torch, comm, call):
    strategy = MultiWorkerMirroredStrategy(communicator=comm)
    value = torch.full((4,), comm.rank + 1.0)
    make, expected = CALLS[call]
    assert (make(strategy, value) == expected).all()
    value.untyped_storage().resize_(0)


def scored(labels, scores):
    metrics.SparseCategoricalAccuracy().update_state(labels, scores)


READ = {
    "a gradient": lambda strategy, variable, value: strategy.run(
        optimizers.SGD(1.0).apply_gradients, [[(value, variable)]]
    ),
    "an initial value": lambda strategy, variable, value: Variable(value),
    "a function's initial value": lambda strategy, variable, value: Variable(lambda: value),
    "assigned": lambda strategy, variable, value: variable.assign(value),
    "added": lambda strategy, variable, value: variable.assign_add(value),
    "rows": lambda strategy, variable, value: IndexedSlices(value, range(4)),
    "Sum": lambda strategy, variable, value: metrics.Sum().update_state(value),
    "Mean": lambda strategy, variable, value: metrics.Mean().update_state(value),
    "weights": lambda strategy, variable, value: metrics.Mean().update_state(np.ones(4), value),
    "labels": lambda strategy, variable, value: metrics.Accuracy().update_state(value, [1] * 4),
    "predictions": lambda strategy, variable, value: metrics.Accuracy().update_state(
        [1] * 4, value
    ),
    "classes": lambda strategy, variable, value: scored(value, np.eye(4)),
    "scores": lambda strategy, variable, value: scored([1], value),
    "losses": lambda strategy, variable, value: strategy.run(compute_average_loss, [value]),
    "a loss": lambda strategy, variable, value: strategy.run(scale_regularization_loss, [value]),
    "broadcast": lambda strategy, variable, value: strategy.extended.broadcast_to(value, 0),
    "a dataset": lambda strategy, variable, value: make_numpy_dataset(value),
}


def test_tensors_that_are_read_keep_their_storages_resizable(torch):
    """Tensors that require grad are refused, since the result would lose the gradient."""
    strategy = lone_strategy()
    with strategy.scope():
        variable = Variable(np.zeros(4, np.float32))
    for read in READ.values():
        value = torch.ones(4)
        read(strategy, variable, value)
        value.untyped_storage().resize_(0)
        differentiated = torch.ones(4, requires_grad=True)
        with pytest.raises((TypeError, ValueError), match="detach"):
            read(strategy, variable, differentiated)
        with torch.no_grad():
            read(strategy, variable, differentiated)
    indices = torch.tensor([3, 1])
    np.testing.assert_array_equal(variable.sparse_read(indices), variable.numpy()[[3, 1]])
    assert IndexedSlices([1.0, 2.0], indices).indices.tolist() == [3, 1]
    indices.untyped_storage().resize_(0)


def test_complex_gradients_of_real_variables_are_refused(torch):
    gradient = torch.tensor([1 + 2j])
    with pytest.raises(TypeError, match=r"is of torch.complex64, and <Variable float32\[1\]>"):
        optimizers.SGD(1.0).apply_gradients([(gradient, Variable([0.0]))])


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("call", CALLS)
def test_one_ranks_tensor_that_requires_grad_is_refused_on_all(torch, comm, call):
    """At once, without waiting for the deadline."""
    strategy = MultiWorkerMirroredStrategy(communicator=comm)
    value = torch.ones(4, requires_grad=comm.rank == comm.size - 1)
    began = time.monotonic()
    with pytest.raises(MismatchError, match="requires grad") as caught:
        CALLS[call][0](strategy, value)
    assert time.monotonic() - began < comm.deadline / 4
    assert set(comm.all_gather_object(str(caught.value))) == {str(caught.value)}
    assert CALLS[call][0](strategy, value.detach()) is not None
