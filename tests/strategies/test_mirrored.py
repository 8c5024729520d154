"""MirroredStrategy: the ranks of one node, their devices, and refusals."""

import numpy as np
import pytest

import collectives
import strategies
from collectives import BackendUnavailableError
from strategies import Variable, get_replica_context, has_strategy, optimizers
from strategies.cross_device_ops import HierarchicalCopyAllReduce, RingAllReduce
from strategies.synchronous import mirrored
from strategies.synchronous.mirrored import MirroredStrategy
from tests.strategies.support import mirrored as mirrored_strategy
from tests.strategies.support import same_refusal

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


def assert_usable(comm):
    with mirrored_strategy(comm) as strategy:
        assert strategy.reduce("sum", float(comm.rank), axis=None) == sum(range(comm.size))


def test_replicas_are_the_ranks(comm):
    with mirrored_strategy(comm) as strategy:
        assert strategy.num_replicas_in_sync == comm.size
        assert strategy.cluster_resolver is None
        assert strategy.is_chief is (comm.rank == 0)
        ids = strategy.run(lambda: get_replica_context().replica_id_in_sync_group)
        assert ids == comm.rank
        assert strategy.extended.worker_devices == ("/device:CPU:0",)


def test_variables_begin_with_the_first_replicas_value_and_stay_equal(comm):
    with mirrored_strategy(comm) as strategy:
        with strategy.scope():
            weights = Variable(np.arange(3.0) + 10 * comm.rank)
        optimizer = optimizers.SGD(0.1)
        for step in range(3):
            gradient = np.full(3, (comm.rank + 1.0) * (step + 1))
            strategy.run(optimizer.apply_gradients, ([(gradient, weights)],))
    total = 6 * comm.size * (comm.size + 1) / 2
    np.testing.assert_allclose(weights.numpy(), np.arange(3.0) - 0.1 * total)
    assert len(set(comm.all_gather_object(weights.numpy().tobytes()))) == 1


def test_the_world_is_all_ranks_by_default(comm):
    strategy = MirroredStrategy()
    assert strategy.num_replicas_in_sync == comm.size
    strategy.communicator.close()


def test_its_traffic_is_separate(comm):
    with mirrored_strategy(comm) as strategy:
        assert strategy.communicator is not comm


def test_tf_config_is_ignored(comm, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "no JSON")
    assert_usable(comm)


# --- several nodes -------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_a_world_of_several_nodes_is_refused(comm):
    from mpi4py import MPI

    node_of = [0] + [1] * (comm.size - 1)
    spread = collectives.Communicator(MPI.COMM_WORLD, node_of=node_of, deadline=30)
    text = same_refusal(comm, ValueError, "nodes", MirroredStrategy, communicator=spread)
    assert f"the {comm.size} ranks are on 2 nodes: use MultiWorkerMirroredStrategy" in text
    other = strategies.MultiWorkerMirroredStrategy(communicator=spread)
    assert other.reduce("sum", 1.0, axis=None) == comm.size
    other.communicator.close()
    spread.close()


# --- devices -------------------------------------------------------------------------------------

FORMS = ["CPU:{}", "/cpu:{}", "/device:CPU:{}", "/job:localhost/replica:0/task:0/device:CPU:{}"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [list, tuple])
def test_devices_are_named_in_the_order_of_ranks(comm, form, kind):
    devices = kind(form.format(number) for number in range(comm.size))
    with mirrored_strategy(comm, devices) as strategy:
        assert strategy.extended.worker_devices == (f"/device:CPU:{comm.rank}",)
        assert strategy.extended.parameter_devices == (f"/device:CPU:{comm.rank}",)
        assert strategy.reduce("sum", 1.0, axis=None) == comm.size


@pytest.mark.ranks(1)
def test_a_single_device_needs_no_list(comm):
    with mirrored_strategy(comm, "CPU:1") as strategy:
        assert strategy.extended.worker_devices == ("/device:CPU:1",)


@pytest.mark.parametrize("count", [-1, 1])
def test_there_must_be_a_device_for_each_rank(comm, count):
    devices = [f"CPU:{number}" for number in range(comm.size + count)]
    arguments = (MirroredStrategy, devices)
    match = f"has {comm.size + count} of them for {comm.size} ranks"
    same_refusal(comm, ValueError, match, *arguments, communicator=comm)
    assert_usable(comm)


@pytest.mark.parametrize(
    "devices", ["GPU:0", "/gpu:1", ["/gpu:0", "/gpu:1"], ["CPU:0", "/device:GPU:0", "CPU:1"]]
)
def test_a_gpu_where_there_is_none(comm, devices):
    arguments = (MirroredStrategy, devices)
    text = same_refusal(comm, BackendUnavailableError, "has a GPU", *arguments, communicator=comm)
    assert "pip install 'mpi-collectives[cuda12]'" in text
    assert_usable(comm)


@pytest.mark.ranks(2, 3)
def test_a_gpu_that_only_some_have(comm, monkeypatch):
    problem = "none here" if comm.rank == 1 else None
    monkeypatch.setattr(mirrored, "gpu_problem", lambda number: problem)
    devices = [f"GPU:{number}" for number in range(comm.size)]
    arguments = (MirroredStrategy, devices)
    same_refusal(comm, BackendUnavailableError, "none here", *arguments, communicator=comm)


def test_gpus_where_all_have_them(comm, monkeypatch):
    taken = []
    monkeypatch.setattr(mirrored, "gpu_problem", lambda number: None)
    monkeypatch.setattr(mirrored, "use_gpu", taken.append)
    devices = [f"/gpu:{number}" for number in range(comm.size)]
    with mirrored_strategy(comm, devices) as strategy:
        assert strategy.extended.worker_devices == (f"/device:GPU:{comm.rank}",)
        assert taken == [comm.rank]


WRONG = {
    "no device": "TPU:0",
    "no number": ["CPU"],
    "empty name": "",
    "numbers": [0, 1],
    "a number": 3,
    "one GPU twice": ["GPU:0", "/gpu:0"],
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_device(comm, case):
    arguments = (MirroredStrategy, WRONG[case])
    text = same_refusal(comm, ValueError, "devices=", *arguments, communicator=comm)
    assert repr(WRONG[case]) in text
    assert_usable(comm)


# --- cross-device ops ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["RingAllReduce", RingAllReduce, 1])
def test_what_are_no_cross_device_ops(comm, wrong):
    arguments = (MirroredStrategy, None, wrong)
    same_refusal(comm, ValueError, "must be a CrossDeviceOps", *arguments, communicator=comm)
    assert_usable(comm)


DIFFERENT = {
    "devices": lambda rank: (None if rank else ["CPU:0", "CPU:1"],),
    "kinds": lambda rank: (None, RingAllReduce() if rank else HierarchicalCopyAllReduce()),
    "packs": lambda rank: (None, RingAllReduce(min(rank, 1) + 1)),
    "one without": lambda rank: (None, RingAllReduce() if rank else None),
    "one wrong": lambda rank: (None, 5 if rank else None),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", DIFFERENT)
def test_arguments_that_differ_are_refused_on_every_rank(comm, case):
    arguments = (MirroredStrategy, *DIFFERENT[case](comm.rank))
    text = same_refusal(comm, ValueError, "arguments differ", *arguments, communicator=comm)
    assert text.count("  rank ") == comm.size
    assert not has_strategy()
    assert_usable(comm)
