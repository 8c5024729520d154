"""OneDeviceStrategy, and TPUStrategy without JAX, whose error names the alternative."""

import sys

import numpy as np
import pytest

from collectives import BackendUnavailableError
from strategies import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
    get_strategy,
    has_strategy,
    optimizers,
)
from strategies.synchronous.default import OneDeviceStrategy
from strategies.synchronous.tpu import TPUStrategy
from tests.strategies.support import refusal


def test_its_variables_are_plain():
    strategy = OneDeviceStrategy("CPU:0")
    with strategy.scope():
        variable = Variable(1.0)
    strategy.run(variable.assign_add, (2.0,))
    assert float(variable) == 3.0


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_each_rank_is_alone(comm):
    strategy = OneDeviceStrategy("/cpu:0", communicator=comm)
    assert (strategy.num_replicas_in_sync, strategy.is_chief) == (1, True)
    assert strategy.cluster_resolver is None
    assert strategy.extended.worker_devices == ("/device:CPU:0",)
    with strategy.scope():
        assert has_strategy()
        assert get_strategy() is strategy
        variable = Variable(comm.rank + 1.0)
    assert float(variable) == comm.rank + 1.0
    assert strategy.reduce("sum", comm.rank, axis=None) == comm.rank
    assert strategy.reduce("mean", np.array([1.0, comm.rank + 2]), axis=0) == (comm.rank + 3) / 2
    assert strategy.gather(np.array([comm.rank]), axis=0).tolist() == [comm.rank]
    inside = strategy.run(lambda: get_replica_context().all_reduce("sum", float(comm.rank)))
    assert inside == comm.rank
    strategy.run(optimizers.SGD(0.5).apply_gradients, ([(np.float64(comm.rank), variable)],))
    assert float(variable) == comm.rank / 2 + 1.0
    assert strategy.run(lambda: get_replica_context().num_replicas_in_sync) == 1


def test_data_stays_whole():
    strategy = OneDeviceStrategy("CPU:0")
    batches = [np.arange(4), np.arange(3)]
    given = [part.tolist() for part in strategy.experimental_distribute_dataset(batches)]
    assert given == [[0, 1, 2, 3], [0, 1, 2]]


def test_aggregates_are_those_of_one():
    strategy = OneDeviceStrategy("cpu:3")
    assert strategy.extended.parameter_devices == ("/device:CPU:3",)
    with strategy.scope():
        kinds = {"synchronization": VariableSynchronization.ON_READ}
        total = Variable(5, aggregation=VariableAggregation.SUM, **kinds)
    strategy.run(lambda: total.assign_add(2))
    assert int(total) == 7


@pytest.mark.parametrize("wrong", [None, "", "CPU", ["CPU:0"], 0, "TPU:0", "CPU:0,CPU:1"])
def test_a_device_has_a_name(wrong):
    refusal(ValueError, "device .*: must be a name such as", OneDeviceStrategy, wrong)


def test_a_gpu_where_there_is_none():
    refusal(BackendUnavailableError, "'/gpu:0'.*pip install", OneDeviceStrategy, "/gpu:0")


@pytest.mark.parametrize("arguments", [(), ("resolver",)])
def test_there_are_no_tpus_without_jax(monkeypatch, arguments):
    monkeypatch.setitem(sys.modules, "strategies.jax.mesh", None)  # where JAX is installed
    text = refusal(NotImplementedError, "TPUs aren't supported", TPUStrategy, *arguments)
    assert "use MirroredStrategy" in text
    refusal(NotImplementedError, "MultiWorker", TPUStrategy, tpu_cluster_resolver=None)
