"""Older names of TensorFlow's API are equivalent to the newer ones."""

import functools
import importlib

import numpy as np
import pytest

import strategies
from collectives import MismatchError
from strategies import InputContext, MultiWorkerMirroredStrategy, experimental, get_strategy
from strategies.core.options import CommunicationImplementation, CommunicationOptions, RunOptions
from strategies.core.values import PerReplica
from tests.strategies.support import Call, lone_strategy, recorded, refusal

RING = CommunicationImplementation.RING


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "given", [(RING,), ("ring",), (experimental.CollectiveCommunication.RING,)]
)
def test_the_communication_is_the_first_argument(comm, given):
    strategy = experimental.MultiWorkerMirroredStrategy(*given, communicator=comm)
    assert isinstance(strategy, MultiWorkerMirroredStrategy)
    with recorded() as calls:
        assert strategy.reduce("sum", 1.0, axis=None) == comm.size
    assert calls == [Call("all_reduce", comm.size, "ring", 1)]
    strategy.communicator.close()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_resolver_is_the_second_argument(comm):
    cluster = strategies.ClusterSpec({"worker": ["a", "b"]})
    resolver = strategies.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="worker", task_id=1 - comm.rank
    )
    strategy = experimental.MultiWorkerMirroredStrategy("AUTO", resolver, communicator=comm)
    assert strategy.cluster_resolver is resolver
    assert strategy.communicator.rank == 1 - comm.rank
    strategy.communicator.close()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_an_implementation_that_one_rank_misspells(comm):
    given = "RING" if comm.rank == 0 else "RINGS"
    make = functools.partial(experimental.MultiWorkerMirroredStrategy, given, communicator=comm)
    with pytest.raises(MismatchError, match="implementation='RINGS'"):
        make()


def test_names():
    assert experimental.CollectiveCommunication is CommunicationImplementation
    assert experimental.CommunicationImplementation is CommunicationImplementation
    assert experimental.CommunicationOptions is CommunicationOptions
    make = experimental.MultiWorkerMirroredStrategy
    refusal(ValueError, "implementation='GLOO'", make, "GLOO")


def test_names_of_other_modules():
    """Also as `from strategies.experimental.partitioners import MinSizePartitioner`."""
    for name in (
        "FixedShardsPartitioner",
        "MaxSizePartitioner",
        "MinSizePartitioner",
        "Partitioner",
    ):
        module = importlib.import_module("strategies.experimental.partitioners")
        assert getattr(module, name) is getattr(experimental.partitioners, name)
        assert getattr(module, name) is getattr(strategies, name)
    older = importlib.import_module("strategies.experimental.coordinator")
    assert older is experimental.coordinator
    assert older.ClusterCoordinator is strategies.coordinator.ClusterCoordinator
    assert older.RemoteValue is strategies.RemoteValue
    assert older.PerWorkerValues is strategies.coordinator.PerWorkerValue
    refusal(TypeError, "create_per_worker_dataset", strategies.coordinator.PerWorkerValue, [1])
    dataset = strategies.coordinator.PerWorkerDataset(3)
    for value in (dataset, iter(dataset)):
        assert isinstance(value, strategies.coordinator.PerWorkerValue)


def test_distributed_datasets_have_their_class():
    dataset = lone_strategy().experimental_distribute_dataset([np.zeros(2)])
    assert isinstance(dataset, strategies.DistributedDataset)
    assert isinstance(iter(dataset), strategies.DistributedIterator)


def test_a_replica_has_its_devices():
    assert strategies.get_replica_context().devices == ("/device:CPU:0",)
    for device in ("CPU:0", "/job:worker/task:0/device:CPU:1"):
        strategy = strategies.OneDeviceStrategy(device)
        replica = strategy.run(strategies.get_replica_context)
        assert replica.devices == (strategy.device,) == strategy.extended.worker_devices


def test_the_other_names_are_those_of_the_package():
    for name in ("CentralStorageStrategy", "ParameterServerStrategy", "ValueContext"):
        assert getattr(experimental, name) is getattr(strategies, name)


@pytest.mark.parametrize("made", [lone_strategy, get_strategy])
def test_methods(made):
    strategy = made()
    assert strategy.experimental_run_v2(lambda a, b: (a, b), (1,), {"b": 2}) == (1, 2)
    assert strategy.experimental_run_v2(len, [[1]]) == 1
    refusal(ValueError, "args=5", strategy.experimental_run_v2, print, 5)
    options = RunOptions(experimental_bucketizing_dynamic_shape=True)
    assert strategy.experimental_run_v2(len, [[1]], options=options) == 1
    assert strategy.run(len, [[1, 2]], options=options) == 2
    assert strategy.run(len, (PerReplica([[1, 2, 3]]),)) == 3
    dataset = strategy.experimental_distribute_datasets_from_function(
        lambda context: [np.array([context.num_input_pipelines, context == InputContext()])]
    )
    assert [batch.tolist() for batch in dataset] == [[1, 1]]
