"""Shared helpers: ranks as threads, and errors that all ranks must raise."""

import contextlib
import json
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest

from collectives import Communicator
from collectives.transports import local
from strategies import MultiWorkerMirroredStrategy
from strategies.input.distribution import THREAD_NAME
from strategies.synchronous.mirrored import MirroredStrategy

PATIENCE_SECONDS = 30


def on_ranks(size, function):
    """Call `function(strategy)` on `size` threads, each a rank; the results in rank order."""

    def one_rank(transport):
        with limited(transport):
            return function(MultiWorkerMirroredStrategy(communicator=Communicator(transport)))

    return local.run(size, one_rank)


@contextlib.contextmanager
def limited(transport):
    """End a rank's wait for another rank with RankFailedError after a time limit."""
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
    """The text of the error that a call must raise; its class must be exactly `error`."""
    with pytest.raises(error, match=match) as caught:
        function(*arguments, **named)
    assert type(caught.value) is error
    return str(caught.value)


def same_refusal(comm, error, match, function, *arguments, **named):
    """As `refusal`, on every rank of a world, with the same text."""
    text = refusal(error, match, function, *arguments, **named)
    assert set(comm.all_gather_object(text)) == {text}
    return text


def tf_config(cluster, task_type=None, index=None):
    """The text of a TF_CONFIG; arguments that are None are omitted."""
    task = {"type": task_type, "index": index}
    task = {key: value for key, value in task.items() if value is not None}
    return json.dumps({"cluster": cluster, "task": task})


@contextlib.contextmanager
def strategy_of(comm, resolver=None):
    """A strategy of the world, with the resolver's cluster."""
    strategy = MultiWorkerMirroredStrategy(resolver, communicator=comm)
    yield strategy
    strategy.communicator.close()


@contextlib.contextmanager
def mirrored(comm, *arguments):
    """A MirroredStrategy of the world."""
    strategy = MirroredStrategy(*arguments, communicator=comm)
    yield strategy
    strategy.communicator.close()


class Call(NamedTuple):
    """A collective call of this rank: its name, the number of ranks and its options."""

    name: str
    size: int
    algorithm: str | None = None
    elements: int | None = None
    root: int | None = None


@contextlib.contextmanager
def recorded():
    """Record the collectives on arrays that any communicator runs in the block."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce", "broadcast", "gather", "all_gather"):
            patch.setattr(Communicator, name, _recording(name, calls))
        patch.setattr(Communicator, "all_reduce_many", _recording_many(calls))
        yield calls


def _recording(name, calls):
    original = getattr(Communicator, name)

    def call(self, array, *arguments, **named):
        elements = getattr(array, "size", None)
        calls.append(Call(name, self.size, named.get("algorithm"), elements, named.get("root")))
        return original(self, array, *arguments, **named)

    return call


def _recording_many(calls):
    original = Communicator.all_reduce_many

    def call(self, arrays, *arguments, bucket_bytes=None, **named):
        elements = sum(np.size(array) for array in arrays)
        calls.append(Call("all_reduce_many", self.size, bucket_bytes, elements))
        return original(self, arrays, *arguments, bucket_bytes=bucket_bytes, **named)

    return call


def arrays_of(rank):
    """Values that depend on the rank, of several dtypes and shapes, exactly representable."""
    count = np.arange(12)
    return {
        "matrix": (count.reshape(3, 4) * (rank + 1)).astype(np.float32),
        "turned": np.asfortranarray((count.reshape(3, 4) + rank).astype(np.float64)),
        "integers": [(count - 5 * rank).astype(np.int32), np.int64(rank)],
        "halves": (np.arange(3) + rank / 2).astype(np.float16),
        "number": np.float32(rank + 0.5),
        "empty": np.zeros((0, 2), np.float32),
        "flags": np.array([rank == 0, False, True]),
    }


def readers():
    """The threads that read batches ahead."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def until(condition):
    """Wait for a condition that another thread makes true."""
    ending = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ending
        time.sleep(0.001)
