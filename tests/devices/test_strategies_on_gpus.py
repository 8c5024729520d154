"""Strategies whose devices are GPUs by name, and values that lie on simulated GPUs."""

import numpy as np
import pytest

from collectives import BackendUnavailableError, MismatchError
from strategies import MirroredStrategy, OneDeviceStrategy, get_replica_context
from strategies.cross_device_ops import NcclAllReduce
from tests.devices import simulated_kernels  # noqa: F401  fills the simulator's kernels
from tests.devices.gpu_worlds import run, simulated
from tests.devices.simulated_arrays import OnDevice
from tests.devices.test_strategies import packs, reduced, strategy_of

# --- devices by name -----------------------------------------------------------------------------


def test_a_gpu_that_is_named_becomes_the_current_one():
    def program(comm, cuda):
        cuda.use_device(0)
        strategy = MirroredStrategy(["GPU:3", "GPU:2"], NcclAllReduce(), communicator=comm)
        assert strategy.device == f"/device:GPU:{3 - comm.rank}"
        assert cuda.current_device() == 3 - comm.rank
        assert reduced(strategy, np.ones(3)).tolist() == [2] * 3
        OneDeviceStrategy("/gpu:5")
        assert cuda.current_device() == 5

    with simulated() as (cuda, nccl):
        run(2, program, gpus=cuda)
        assert {comm.owner: comm.device for comm in nccl.comms} == {0: 3, 1: 2}


def test_a_gpu_that_is_not_there():
    def program(comm, cuda):
        with pytest.raises(BackendUnavailableError, match="there is no GPU 2: this process sees 2"):
            MirroredStrategy(["GPU:0", "GPU:2"], communicator=comm)
        with pytest.raises(BackendUnavailableError, match="there is no GPU 9"):
            OneDeviceStrategy("/gpu:9")

    with simulated(devices=2) as (cuda, _):
        run(2, program, gpus=cuda)


# --- arrays on GPUs ------------------------------------------------------------------------------

WAYS = {
    "AUTO": lambda comm: strategy_of(comm),
    "RING": lambda comm: strategy_of(comm, 0, None, "RING"),
    "NCCL": lambda comm: strategy_of(comm, 0, None, "NCCL"),
    "ops": lambda comm: MirroredStrategy(None, NcclAllReduce(), communicator=comm),
}


@pytest.mark.parametrize("way", WAYS)
def test_they_stay_there(way):
    def program(comm, cuda):
        strategy = WAYS[way](comm)

        def there(values):
            return cuda.from_host(np.asarray(values, np.float32))

        given = {"a": there([comm.rank, 1]), "b": np.ones(2), "c": there([[3 * comm.rank]])}
        results = reduced(strategy, given)
        assert [type(results[key]) for key in "abc"] == [OnDevice, np.ndarray, OnDevice]
        assert results["a"].get().tolist() == [3, 3]
        assert results["b"].tolist() == [3, 3]
        assert results["c"].get().tolist() == [[9]]
        assert strategy.reduce("mean", there([comm.rank]), axis=None).get().tolist() == [1]
        rows = there([comm.rank] * (comm.rank + 1))
        assert strategy.gather(rows, axis=0).get().tolist() == [0, 1, 1, 2, 2, 2]
        inside = strategy.run(lambda: get_replica_context().all_gather([rows], axis=0))
        assert inside[0].get().tolist() == [0, 1, 1, 2, 2, 2]

    with simulated() as (cuda, nccl):
        run(3, program, gpus=cuda)
        assert packs(nccl)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_must_agree_where_arrays_lie(way):
    def program(comm, cuda):
        strategy = WAYS[way](comm)
        given = cuda.from_host(np.ones(3)) if comm.rank else np.ones(3)
        with pytest.raises(MismatchError) as caught:
            reduced(strategy, given)
        return str(caught.value)

    assert len(set(run(2, program))) == 1


@pytest.mark.parametrize("ranks", ["all", "some"])
def test_axes_are_for_arrays_of_the_host(ranks):
    def program(comm, cuda):
        given = np.ones(3) if ranks == "some" and comm.rank else cuda.from_host(np.ones(3))
        error = TypeError if ranks == "all" else MismatchError
        with pytest.raises(error, match=r"takes arrays of the host.*get\(\)"):
            strategy_of(comm).reduce("sum", given, axis=0)

    run(2, program)
