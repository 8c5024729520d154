"""Tensors of torch as values that a strategy reduces and gathers."""

import pytest

from strategies import MultiWorkerMirroredStrategy

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
