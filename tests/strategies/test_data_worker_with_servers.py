"""A dataset rank and parameter servers: ranks end independently of each other."""

import itertools
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from strategies import ClusterSpec, DatasetWorker, ParameterServerStrategy, Variable, optimizers
from strategies.cluster_resolver import SimpleClusterResolver
from strategies.input import make_numpy_dataset
from tests.worlds.programs import errors_of

BATCHES = 9
DEADLINE = 15


def resolver_of(rank, size, data_tasks=1):
    """The ps first, then the workers, then the data tasks."""
    workers = size - 1 - data_tasks
    cluster = {"ps": ["s"], "worker": ["w"] * workers, "data": ["d"] * data_tasks}
    roles = [(job, index) for job, tasks in cluster.items() for index in range(len(tasks))]
    job, index = roles[rank]
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=job, task_id=index)


def dataset(context):
    first = 100 * context.input_pipeline_id
    return [np.full(2, first + number) for number in range(BATCHES)]


def train(strategy, data, limit=100):
    """The numbers of the batches that this worker took; at most `limit`."""
    with strategy.scope():
        total, optimizer = Variable(0.0), optimizers.SGD(1.0)
    taken = []
    for batch in data:
        strategy.run(optimizer.apply_gradients, ([(-float(batch[0]), total)],))
        taken.append(int(batch[0]))
        if len(taken) == limit:
            break
    return taken


def leaving_the_block(strategy, data):
    with data:
        taken = serve_or(strategy, data, lambda: train(strategy, data))
    strategy.shutdown()
    return taken


def shutdown_inside_the_block(strategy, data):
    with data:
        taken = serve_or(strategy, data, lambda: train(strategy, data))
        strategy.shutdown()
    return taken


def close_before_shutdown(strategy, data):
    taken = serve_or(strategy, data, lambda: train(strategy, data))
    data.close()
    strategy.shutdown()
    return taken


def close_after_shutdown(strategy, data):
    taken = serve_or(strategy, data, lambda: train(strategy, data))
    strategy.shutdown()
    data.close()
    data.close()
    return taken


def the_servers_outside_of_the_block(strategy, data):
    """As a script that branches on its role first."""
    if strategy.cluster_resolver.task_type == "ps":
        strategy.serve()
        return []
    return leaving_the_block(strategy, data)


def one_worker_leaves_early(strategy, data):
    """The loop ends by `break`; the others get the batches that it returns."""
    limit = 1 if strategy.is_chief else 100
    with data:
        taken = serve_or(strategy, data, lambda: train(strategy, data, limit))
    strategy.shutdown()
    return taken


def an_error_ends_the_block(strategy, data):
    """One worker's error, which it catches: its dataset ends there, the others' continue."""
    taken = []

    def fail():
        taken.extend(train(strategy, data, 1))
        raise KeyError("bad batch")

    fails = strategy.cluster_resolver.task_type == "worker" and strategy.is_chief
    with pytest.raises(KeyError, match="bad batch") if fails else nullcontext(), data:
        if fails:
            fail()
        taken = serve_or(strategy, data, lambda: train(strategy, data))
    assert data._box.closed or not fails
    strategy.shutdown()
    return taken


def serve_or(strategy, data, work):
    """Do what this rank's role requires until the workers have finished."""
    if strategy.cluster_resolver.task_type == "ps":
        strategy.serve()
        return []
    if data.serves:
        data.serve()
        return []
    return work()


FORMS = [
    leaving_the_block,
    shutdown_inside_the_block,
    close_before_shutdown,
    close_after_shutdown,
    the_servers_outside_of_the_block,
    one_worker_leaves_early,
    an_error_ends_the_block,
]


@pytest.mark.mpi
@pytest.mark.ranks(3, 4, 5)
def test_ranks_may_end_in_every_order(comm):
    before, comm.deadline = comm.deadline, DEADLINE
    for data_tasks, form in itertools.product(range(1, min(2, comm.size - 2) + 1), FORMS):
        resolver = resolver_of(comm.rank, comm.size, data_tasks)
        strategy = ParameterServerStrategy(resolver, communicator=comm)
        data = DatasetWorker(strategy, dataset, agreed=False)
        taken = form(strategy, data)
        numbers = sorted(itertools.chain(*comm.all_gather_object(taken)))
        wanted = [100 * task + number for task in range(data_tasks) for number in range(BATCHES)]
        if form in (one_worker_leaves_early, an_error_ends_the_block):
            # Its batches are dropped where the others had ended before.
            assert numbers, (data_tasks, form.__name__)
            assert set(numbers) <= set(wanted), (data_tasks, form.__name__)
            assert len(numbers) == len(set(numbers)), (data_tasks, form.__name__)
        else:
            assert numbers == wanted, (data_tasks, form.__name__)
    comm.deadline = before


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
def test_without_a_data_task_workers_shuffle_alike(comm):
    before, comm.deadline = comm.deadline, DEADLINE
    strategy = ParameterServerStrategy(resolver_of(comm.rank, comm.size, 0), communicator=comm)
    data = DatasetWorker(strategy, lambda _: make_numpy_dataset(np.arange(24)).shuffle(24).batch(2))
    taken = serve_or(strategy, data, lambda: [int(each) for batch in data for each in batch])
    strategy.shutdown()
    assert sorted(itertools.chain(*comm.all_gather_object(taken))) == list(range(24))
    comm.deadline = before


PROGRAM = """
import sys
from contextlib import nullcontext
import collectives, strategies
from tests.strategies.test_data_worker_with_servers import dataset, resolver_of, serve_or, train
world = collectives.world(deadline=10)
strategy = strategies.ParameterServerStrategy(resolver_of(world.rank, world.size))
data = strategies.DatasetWorker(strategy, dataset, agreed=False)
def work():
    train(strategy, data, 2 if world.rank == 1 else 100)
    if world.rank == 1:
        sys.exit()
serve_or(strategy, data, work)
print("ended", flush=True)
"""


def test_close_and_shutdown_are_optional(launch):
    """One worker ends in the middle of its data, the other one after it."""
    ended = launch(4, [sys.executable, "-c", PROGRAM], timeout=60)
    assert (ended.returncode, errors_of(ended)) == (0, "")
    assert ended.stdout.count("ended") == 3
