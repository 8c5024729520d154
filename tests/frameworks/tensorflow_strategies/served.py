"""Worlds of TensorFlow's workers and parameter servers for tests."""

from tests.strategies.parameter_servers import resolver_of


def run_workers(ds, comm, work, *, servers=1, chief=False, **named):
    """Call `work(strategy)` on the workers, or the chief alone; the results in rank order."""
    resolver = resolver_of(comm.rank, comm.size, servers, chief=chief)
    strategy = ds.ParameterServerStrategy(resolver, communicator=comm, **named)
    return run_on_workers(comm, strategy, lambda: work(strategy), chief=chief)


def run_on_workers(comm, strategy, work, *, chief=False, everywhere=False):
    """The same with a strategy that is made; `everywhere`: `work` serves itself on servers."""
    result = None
    try:
        serves = strategy.is_server or (chief and not strategy.is_chief)
        if serves and not everywhere:
            strategy.serve()
        else:
            result = work()
    finally:
        strategy.shutdown()
        strategy._served.membership.group.close()
        strategy._served._mailbox.close()
    return comm.all_gather_object(result)


def together(strategy):
    """Return when all that the workers have pushed is applied."""
    strategy._served.worker.client.fence()
    strategy._served.membership.group.barrier()
