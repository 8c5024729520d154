"""Worlds of workers and parameter servers for tests."""

import contextlib

import pytest

from collectives import Communicator
from collectives.transports import local
from strategies import ClusterSpec
from strategies.cluster_resolver import SimpleClusterResolver
from strategies.parameter_server import ParameterServerStrategy
from tests.strategies.support import limited

worlds = pytest.mark.ranks(2, 3, 4, 5)


def resolver_of(rank, size, servers, *, chief=False):
    """The first ranks are servers and the last ones workers, so that tasks aren't in rank order."""
    workers = size - servers
    cluster = {"ps": ["s"] * servers, "worker": ["w"] * (workers - chief)}
    if chief:
        cluster["chief"] = ["c"]
    task_type, index = ("ps", rank) if rank < servers else ("worker", rank - servers)
    if chief and rank == size - 1:
        task_type, index = "chief", 0
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=task_type, task_id=index)


@contextlib.contextmanager
def strategy_on(comm, servers, *, chief=False, **named):
    """A strategy of the world with this number of servers."""
    resolver = resolver_of(comm.rank, comm.size, servers, chief=chief)
    strategy = ParameterServerStrategy(resolver, communicator=comm, **named)
    yield strategy
    strategy.membership.group.close()
    strategy._mailbox.close()


def run_workers(comm, servers, work, **named):
    """Call `work(strategy)` on the workers; their results in the order of their tasks."""
    with strategy_on(comm, servers, **named) as strategy:
        result = None
        if comm.rank in strategy.roles.servers:
            strategy.serve()
        else:
            with strategy.scope():
                result = work(strategy)
            strategy.shutdown()
        results = comm.all_gather_object(result)
        return [results[rank] for rank in strategy.roles.workers]


def on_threads(size, servers, work, *, node_of=None, **named):
    """As `run_workers`, on threads; the results of the first rank."""

    def one_rank(transport):
        with limited(transport):
            comm = Communicator(transport, deadline=20, node_of=node_of)
            return run_workers(comm, servers, work, **named)

    return local.run(size, one_rank)[0]


def number_of(strategy):
    """The worker's number."""
    return strategy.roles.workers.index(strategy.membership.world.rank)


def together(strategy):
    """Synchronize the workers."""
    strategy.membership.group.barrier()
