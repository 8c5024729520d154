"""MultiWorkerMirroredStrategy between MPI ranks whose TF_CONFIG is valid: §2.6 and §2.7."""

import socket

import numpy as np
import pytest

import strategies
from strategies import ClusterSpec, Variable, get_replica_context
from strategies.cluster_resolver import (
    MPIClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from tests.strategies.support import refusal, strategy_of, tf_config

pytestmark = pytest.mark.mpi


def workers(size):
    return {"worker": [f"host{index}" for index in range(size)]}


def chief_and_workers(size):
    return {"worker": [f"w{index}" for index in range(size - 1)], "chief": ["c"]}


def sparse_workers(size):
    return {"worker": {str(3 * index + 1): f"w{index}" for index in range(size)}}


CLUSTERS = [workers, chief_and_workers, sparse_workers]
LAUNCHES = {
    "in order": lambda rank, size: rank,
    "shifted": lambda rank, size: (rank + 1) % size,
    "reversed": lambda rank, size: size - 1 - rank,
}
in_any_cluster = pytest.mark.parametrize("cluster_of", CLUSTERS)
launched = pytest.mark.parametrize("launch", LAUNCHES)


def tasks_of(cluster):
    """The tasks by id."""
    spec = ClusterSpec(cluster)
    return [
        (job, index)
        for job in ("chief", "worker", "evaluator", "data")
        if job in spec.jobs
        for index in spec.task_indices(job)
    ]


@pytest.fixture
def place(comm, monkeypatch):
    """A function that gives this rank a task through TF_CONFIG, and returns its id."""

    def take(cluster, launch="in order"):
        mine = LAUNCHES[launch](comm.rank, comm.size)
        monkeypatch.setenv("TF_CONFIG", tf_config(cluster, *tasks_of(cluster)[mine]))
        return mine

    return take


# --- ids are those of the cluster ----------------------------------------------------------------


@in_any_cluster
@launched
def test_replicas_are_numbered_by_the_cluster_whatever_the_launch(comm, place, cluster_of, launch):
    cluster = cluster_of(comm.size)
    mine = place(cluster, launch)
    with strategy_of(comm) as strategy:
        ids = strategy.run(lambda: get_replica_context().replica_id_in_sync_group)
        assert (ids, strategy.num_replicas_in_sync) == (mine, comm.size)
        assert strategy.is_chief is (mine == 0)
        resolver = strategy.cluster_resolver
        assert (resolver.task_type, resolver.task_id) == tasks_of(cluster)[mine]
        assert resolver.cluster_spec() == ClusterSpec(cluster)


@in_any_cluster
@launched
def test_what_is_gathered_and_split_follows_the_ids(comm, place, cluster_of, launch):
    mine = place(cluster_of(comm.size), launch)
    with strategy_of(comm) as strategy:
        ranks = strategy.gather(np.array([comm.rank]), axis=0).tolist()
        assert [LAUNCHES[launch](rank, comm.size) for rank in ranks] == list(range(comm.size))
        batch = np.arange(2 * comm.size - 1)
        (part,) = strategy.experimental_distribute_dataset([batch])
        assert part.tolist() == batch[2 * mine : 2 * mine + 2].tolist()
        ids = strategy.distribute_datasets_from_function(
            lambda context: [np.array([context.input_pipeline_id])]
        )
        assert [each.tolist() for each in ids] == [[mine]]


@launched
def test_the_chiefs_initial_value_counts_wherever_it_runs(comm, place, launch):
    mine = place(chief_and_workers(comm.size), launch)
    with strategy_of(comm) as strategy:
        with strategy.scope():
            variable = Variable(100.0 + mine)
        total = strategy.reduce("sum", mine, axis=None)
        assert (float(variable), int(total)) == (100.0, comm.size * (comm.size - 1) // 2)


def test_sums_have_the_same_bits_in_every_order_of_launch(comm, place):
    sums = []
    for launch in LAUNCHES:
        mine = place(workers(comm.size), launch)
        with strategy_of(comm) as strategy:
            value = np.random.default_rng(mine).normal(size=100)
            sums.append(strategy.reduce("sum", value, axis=None).tobytes())
    assert len({each for ranks in comm.all_gather_object(sums) for each in ranks}) == 1


# --- separate groups -----------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("inside", [True, False], ids=["in the cluster", "outside of it"])
@pytest.mark.parametrize("at", [0, -1], ids=["first rank", "last rank"])
def test_an_evaluator_is_a_group_of_its_own(comm, monkeypatch, inside, at):
    cluster = workers(comm.size - 1)
    tasks = [("evaluator", 0), *tasks_of(cluster)] if at == 0 else tasks_of(cluster)
    tasks += [("evaluator", 0)] if at else []
    cluster |= {"evaluator": ["e"]} if inside else {}
    role, index = tasks[comm.rank]
    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, role, index))
    with strategy_of(comm) as strategy:
        evaluates = role == "evaluator"
        assert strategy.num_replicas_in_sync == (1 if evaluates else comm.size - 1)
        assert strategy.is_chief is (evaluates or index == 0)
        assert strategy.communicator.rank == index
        assert strategy.cluster_resolver.task_type == role
        total = strategy.reduce("sum", 10.0 if evaluates else 1.0, axis=None)
        assert total == (10.0 if evaluates else comm.size - 1)


@pytest.mark.ranks(3, 4, 5)
def test_training_evaluation_and_data_are_apart(comm, place):
    cluster = {"data": ["d"], "evaluator": ["e"], "chief": ["c"]}
    cluster |= {"worker": workers(comm.size - 3)["worker"]}
    mine = place(cluster, "shifted")
    role, _ = tasks_of(cluster)[mine]
    with strategy_of(comm) as strategy:
        gathered = strategy.gather(np.array([mine]), axis=0).tolist()
        training = list(range(comm.size - 2))
        assert gathered == {"evaluator": [comm.size - 2], "data": [comm.size - 1]}.get(
            role, training
        )
        assert strategy.is_chief is (role in ("chief", "evaluator"))


# --- sources of the cluster ----------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "{}", '{"task": {"type": "ps", "index": 5}}'])
def test_without_a_cluster_every_rank_is_a_worker(comm, monkeypatch, text):
    if text and comm.rank % 2 == 0:
        monkeypatch.setenv("TF_CONFIG", text)
    with strategy_of(comm) as strategy:
        assert (strategy.communicator.rank, strategy.num_replicas_in_sync) == (comm.rank, comm.size)
        resolver = strategy.cluster_resolver
        assert (resolver.task_type, resolver.task_id) == ("worker", comm.rank)
        hosts = comm.all_gather_object(socket.gethostname())
        addresses = [f"{host}:{rank}" for rank, host in enumerate(hosts)]
        assert resolver.cluster_spec() == ClusterSpec({"worker": addresses})


def simple(cluster, task_type, index):
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=task_type, task_id=index)


@launched
def test_a_given_resolver_goes_before_the_variable(comm, monkeypatch, launch):
    monkeypatch.setenv("TF_CONFIG", "no JSON")
    mine = LAUNCHES[launch](comm.rank, comm.size)
    resolver = simple(workers(comm.size), "worker", mine)
    with strategy_of(comm, resolver) as strategy:
        assert strategy.cluster_resolver is resolver
        assert strategy.communicator.rank == mine


def test_resolvers_and_variables_may_be_mixed(comm, place):
    mine = place(workers(comm.size), "reversed")
    makers = [TFConfigClusterResolver, lambda: None]
    makers.append(lambda: simple(workers(comm.size), "worker", mine))
    with strategy_of(comm, makers[comm.rank % 3]()) as strategy:
        assert strategy.communicator.rank == mine


def test_the_mpi_resolver_makes_every_rank_a_worker(comm, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "no JSON")
    with strategy_of(comm, MPIClusterResolver(comm)) as strategy:
        assert (strategy.communicator.rank, strategy.num_replicas_in_sync) == (comm.rank, comm.size)


def test_a_resolver_without_a_cluster(comm):
    with strategy_of(comm, SimpleClusterResolver(ClusterSpec({}))) as strategy:
        assert (strategy.communicator.rank, strategy.num_replicas_in_sync) == (comm.rank, comm.size)


def test_replicas_in_step_have_nothing_to_synchronize(comm):
    with strategy_of(comm) as strategy:
        strategy.synchronize()
        refusal(RuntimeError, "inside `run`", strategy.run, strategy.synchronize)


def test_the_world_is_all_ranks_by_default(comm, place):
    mine = place(workers(comm.size), "shifted")
    strategy = strategies.MultiWorkerMirroredStrategy()
    assert (strategy.communicator.rank, strategy.num_replicas_in_sync) == (mine, comm.size)
    strategy.communicator.close()


def test_strategies_do_not_disturb_each_other(comm, place):
    place(workers(comm.size), "reversed")
    with strategy_of(comm) as one, strategy_of(comm) as other:
        assert one.communicator is not other.communicator
        totals = [each.reduce("sum", 1.0, axis=None) for each in (one, other, one)]
        assert [float(total) for total in totals] == [comm.size] * 3
        with one.scope(), pytest.raises(RuntimeError, match="Mixing different"):
            other.scope()
