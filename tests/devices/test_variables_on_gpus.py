"""Variables that lie on simulated GPUs, and optimizers that update them there."""

import numpy as np
import pytest

from collectives import MismatchError
from strategies import (
    CentralStorageStrategy,
    Checkpoint,
    IndexedSlices,
    LocalSGDStrategy,
    MirroredStrategy,
    Variable,
    VariableAggregation,
    VariableSynchronization,
)
from strategies.checkpoint.states import VariableState
from strategies.optimizers import SGD, Adam
from tests.devices import simulated_kernels  # noqa: F401  fills the simulator's kernels
from tests.devices.gpu_worlds import run, same, simulated
from tests.devices.simulated_arrays import OnDevice

OPTIMIZERS = {
    "SGD": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, 0.9, clipnorm=0.5),
    "Nesterov's": lambda: SGD(lambda step: 0.1 / (step + 1), 0.9, True),
    "Adam": lambda: Adam(0.1, global_clipnorm=1.5),
}
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float32)


def gradients_of(rank, step):
    return [values * (rank + 1) - step for values in VALUES]


def trained(strategy, optimizer, variables, steps, place=lambda array: array):
    for step in steps:
        gradients = map(place, gradients_of(strategy.communicator.rank, step))
        pairs = list(zip(gradients, variables, strict=True))
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2])
def test_steps_are_those_of_the_host_and_change_the_memory_in_place(size, name, tmp_path):
    def program(comm, cuda):
        strategy = MirroredStrategy(communicator=comm)
        with strategy.scope():
            expected = [Variable(values) for values in VALUES]
            # The chief's values count.
            found = [Variable(cuda.from_host(values + comm.rank)) for values in VALUES]
        host, device = OPTIMIZERS[name](), OPTIMIZERS[name]()
        addresses = [cuda.address(each.local) for each in found]
        trained(strategy, host, expected, range(3))
        trained(strategy, device, found[:], range(2), cuda.from_host)
        checkpoint = Checkpoint(optimizer=device, first=found[0], second=found[1])
        path, saved = checkpoint.save(tmp_path / "saved"), device.saved_tensors()
        kept = [VariableState("", each).save()[""] for each in found]
        assert {type(each) for each in [*saved.values(), *kept]} == {np.ndarray}
        trained(strategy, device, found, range(5, 7))  # gradients of the host, lost again
        checkpoint.restore(path)
        trained(strategy, device, found, [2], cuda.from_host)
        after = [each.numpy() for each in found]
        # The same into an optimizer that has no slots yet.
        checkpoint.restore(path)
        device = OPTIMIZERS[name]()
        device.restore_tensors(saved)
        trained(strategy, device, found, [2], cuda.from_host)
        for one, other in zip(found, after, strict=True):
            np.testing.assert_array_equal(one.numpy(), other)
        for one, other, address in zip(found, expected, addresses, strict=True):
            assert type(one.local) is OnDevice
            assert cuda.address(one.local) == address
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
        for slot in device._numbered_slots().values():
            assert slot.on_gpu

    run(size, program)


def test_reads_and_assignments():
    def program(comm, cuda):
        strategy, mean = MirroredStrategy(communicator=comm), VariableAggregation.MEAN
        with strategy.scope():
            total = Variable(cuda.from_host(np.zeros(3, np.float32)), aggregation=mean)
            own = Variable(
                lambda: cuda.from_host(np.ones(3)),
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
                dtype=np.float32,
            )
        assert own.dtype == np.float32
        given = cuda.from_host(np.full(3, 3 * comm.rank, np.float32))
        strategy.run(lambda: total.assign_add(given))
        same(total.read_value(), np.full(3, 3, np.float32))
        strategy.run(lambda: own.assign([comm.rank, 1, 2]))
        assert own.numpy().tolist() == [3, 3, 6]
        total.assign([1, 2, 3]).assign_sub(np.ones(3, np.float32))
        part = total[1:]
        total.assign(np.full(3, 7, np.float32))
        same(part, np.array([1, 2], np.float32))
        same(total * 2 + given, 14 + np.full(3, 3 * comm.rank, np.float32))
        alone = Variable(given)  # of the default strategy
        alone.assign_add(given)
        same(alone.read_value(), np.full(3, 6 * comm.rank, np.float32))
        same(given, np.full(3, 3 * comm.rank, np.float32))
        own.assign(cuda.from_host(np.full(3, 6, np.float32)))
        same(own.local, np.full(3, 2, np.float32))

    run(3, program)


def test_what_is_refused():
    def program(comm, cuda):
        strategy = MirroredStrategy(communicator=comm)
        there = cuda.from_host(np.ones(3, np.float32))
        with strategy.scope():
            variable, host = Variable(there), Variable(np.ones(3, np.float32))
        rows = IndexedSlices(np.ones(1, np.float32), [0])
        with pytest.raises(TypeError, match="use numpy"):
            np.asarray(variable)
        with pytest.raises(TypeError, match="on a GPU"):
            host.assign(there)
        with pytest.raises(NotImplementedError, match="lies on a GPU"):
            variable.scatter_add(rows)
        with pytest.raises(NotImplementedError, match="lies on a GPU"):
            variable.sparse_read([0])
        with pytest.raises(ValueError, match="shape"):
            variable.assign(cuda.from_host(np.ones(2, np.float32)))
        for wrong, target in ((rows, variable), (there, host)):
            with pytest.raises(TypeError, match="on a GPU"):
                strategy.run(lambda pair=(wrong, target): SGD().apply_gradients([pair]))
        with pytest.raises(TypeError, match="on a GPU"):
            SGD().gradient_views([variable])
        with strategy.scope(), pytest.raises(MismatchError):
            Variable(there if comm.rank else np.ones(3, np.float32))
        for other in (
            CentralStorageStrategy(communicator=comm),
            LocalSGDStrategy(2, communicator=comm),
        ):
            with other.scope(), pytest.raises(TypeError, match="on the host"):
                Variable(there)

    with simulated() as (cuda, _):
        run(2, program, gpus=cuda)
