"""What the tests of strategies share: ranks as threads, and errors that all ranks must raise."""

import contextlib
import json
import threading

import pytest

from collectives import Communicator
from collectives.transports import local
from strategies import MultiWorkerMirroredStrategy

PATIENCE_SECONDS = 30


def on_ranks(size, function):
    """Call `function(strategy)` on so many threads, each a rank; the results in rank order."""

    def one_rank(transport):
        with limited(transport):
            return function(MultiWorkerMirroredStrategy(communicator=Communicator(transport)))

    return local.run(size, one_rank)


@contextlib.contextmanager
def limited(transport):
    """Wake a rank that waits for ever for another: its wait ends with RankFailedError."""
    alarm = threading.Timer(PATIENCE_SECONDS, transport._switchboard.fail, [transport.rank])
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def as_replicas(size, function):
    """Call `function(strategy, replica id)` inside `run` on threads; the results in rank order."""
    return on_ranks(
        size, lambda strategy: strategy.run(function, (strategy, strategy.communicator.rank))
    )


def lone_strategy():
    """A strategy of one replica, without MPI."""
    return MultiWorkerMirroredStrategy(communicator=Communicator(local.alone()))


def refusal(error, match, function, *arguments, **named):
    """The text of the error that a call must raise, of exactly that class."""
    with pytest.raises(error, match=match) as caught:
        function(*arguments, **named)
    assert type(caught.value) is error
    return str(caught.value)


def same_refusal(comm, error, match, function, *arguments, **named):
    """As `refusal`, on every rank of a world, with one text."""
    text = refusal(error, match, function, *arguments, **named)
    assert set(comm.all_gather_object(text)) == {text}
    return text


def tf_config(cluster, task_type=None, index=None):
    """The text of a TF_CONFIG; what is None is left out."""
    task = {"type": task_type, "index": index}
    task = {key: value for key, value in task.items() if value is not None}
    return json.dumps({"cluster": cluster, "task": task})


@contextlib.contextmanager
def strategy_of(comm, resolver=None):
    """A strategy of the world, as the cluster says that it is made up."""
    strategy = MultiWorkerMirroredStrategy(resolver, communicator=comm)
    yield strategy
    strategy.communicator.close()
