"""Variables and values of strategies that lie on the GPU, on two ranks that share it."""

import numpy as np
import pytest

from strategies import MirroredStrategy, Variable, get_replica_context
from tests.devices.test_variables_on_gpus import OPTIMIZERS, VALUES, trained

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_host(gpu, comm, name):
    strategy = MirroredStrategy(communicator=comm)
    with strategy.scope():
        expected = [Variable(values) for values in VALUES]
        # The chief's values count.
        found = [Variable(gpu.from_host(values + comm.rank)) for values in VALUES]
    addresses = [gpu.address(each.local) for each in found]
    trained(strategy, OPTIMIZERS[name](), expected, range(3))
    trained(strategy, OPTIMIZERS[name](), found, range(3), gpu.from_host)
    for one, other, address in zip(found, expected, addresses, strict=True):
        assert type(one.local) is gpu.array_type
        assert gpu.address(one.local) == address
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


def test_values_stay_on_the_gpu(gpu, comm):
    strategy = MirroredStrategy(communicator=comm)
    given = gpu.from_host(np.array([comm.rank, 1], np.float32))
    total = strategy.reduce("sum", given, axis=None)
    assert type(total) is gpu.array_type
    assert total.tolist() == [1, 2]
    rows = gpu.from_host(np.full(comm.rank + 1, comm.rank, np.float32))
    assert strategy.gather(rows, axis=0).tolist() == [0, 1, 1]
    inside = strategy.run(lambda: get_replica_context().all_gather([rows], axis=0))
    assert inside[0].tolist() == [0, 1, 1]
