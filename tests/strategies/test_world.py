"""`communicator=`: what every strategy accepts, and the error for anything else."""

import numpy as np
import pytest

from collectives import Communicator, world
from strategies import (
    CentralStorageStrategy,
    DatasetWorker,
    LocalSGDStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    Strategy,
    cluster_resolver,
    experimental,
    train_and_evaluate,
)
from strategies.core.world import world_of
from tests.strategies.support import refusal

TAKERS = {
    "MirroredStrategy": lambda comm: MirroredStrategy(communicator=comm),
    "MultiWorkerMirrored": lambda comm: MultiWorkerMirroredStrategy(communicator=comm),
    "experimental": lambda comm: experimental.MultiWorkerMirroredStrategy(communicator=comm),
    "CentralStorage": lambda comm: CentralStorageStrategy(communicator=comm),
    "LocalSGD": lambda comm: LocalSGDStrategy(sync_every=1, communicator=comm),
    "ParameterServer": lambda comm: ParameterServerStrategy(communicator=comm),
    "OneDevice": lambda comm: OneDeviceStrategy("CPU:0", communicator=comm),
    "Strategy": Strategy,
    "MPIClusterResolver": cluster_resolver.MPIClusterResolver,
    "DatasetWorker.resolver": lambda comm: DatasetWorker.resolver(communicator=comm),
    "train_and_evaluate": lambda comm: train_and_evaluate(
        lambda strategy: None, lambda strategy: None, "unused", communicator=comm
    ),
}


WRONG = [(5, "builtins.int"), ("world", "builtins.str"), ({}, "builtins.dict")]


def test_other_types_are_named():
    for name, take in TAKERS.items():
        for wrong, kind in WRONG:
            text = refusal(TypeError, "must be a collectives.Communicator", take, wrong)
            assert text.startswith(f"communicator is a {kind}: "), name
            assert text.endswith("or None for that of all ranks"), name


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_a_communicator_of_mpi4py_is_to_be_wrapped(comm):
    """In a call that no rank waits for: each rank raises it locally."""
    from mpi4py import MPI

    for name, take in TAKERS.items():
        text = refusal(TypeError, "Communicator", take, MPI.COMM_WORLD)
        assert "communicator is a mpi4py.MPI.Intracomm: must be a collectives.Communicator" in text
        assert text.endswith("make one by Communicator(comm)"), name
    with Communicator(MPI.COMM_WORLD) as wrapped:
        strategy = MultiWorkerMirroredStrategy(communicator=wrapped)
        assert (
            strategy.reduce("sum", np.float64(comm.rank), None) == comm.size * (comm.size - 1) / 2
        )
        strategy.communicator.close()
        assert world_of(wrapped) is wrapped


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_none_is_the_world_of_all_ranks(comm):
    strategy = Strategy(None)
    assert strategy.communicator is world()
    assert strategy.reduce("sum", comm.rank, None) == comm.size * (comm.size - 1) / 2
