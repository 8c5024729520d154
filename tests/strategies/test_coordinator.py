"""A chief that schedules functions on the other ranks of a world."""

import threading
import time
from functools import partial

import numpy as np
import pytest

import strategies
from collectives import Communicator
from collectives.transports import local
from strategies import MultiWorkerMirroredStrategy, ReduceOp, Strategy, Variable
from strategies.coordinator import ClusterCoordinator, RemoteValue
from strategies.coordinator.link import Link
from strategies.coordinator.worker import across_replicas, serve_chief
from strategies.errors import CancelledError, OutOfRangeError, RemoteTracebackError

pytestmark = pytest.mark.mpi

# Set by the functions below on every rank.
HERE = {}


class CoordinatedStrategy(Strategy):
    """A strategy of one replica, whose ranks are a chief and workers."""

    def __init__(self, comm):
        super().__init__(Communicator(local.alone()))
        self.link = Link(comm.mailbox(), 0, names_of_workers(comm), {})

    def run(self, fn, args=(), kwargs=None):
        with across_replicas(self):
            return super().run(fn, args, kwargs)

    def reduce(self, reduce_op, value, axis):
        with across_replicas(self):
            return super().reduce(reduce_op, value, axis)


def names_of_workers(comm):
    return {rank: f"worker {rank - 1} (rank {rank})" for rank in range(1, comm.size)}


def coordinated(comm, chief):
    """Call `chief(coordinator)` on rank 0 while the others serve."""
    strategy = CoordinatedStrategy(comm)
    HERE.update(rank=comm.rank, strategy=strategy, calls=[])
    try:
        if strategy.link.is_chief:
            chief(ClusterCoordinator(strategy))
        else:
            serve_chief(strategy, strategy.link, lambda: None)
    finally:
        if strategy.link.is_chief:
            strategy.link.end()
        strategy.link.box.close()


@pytest.mark.ranks(2, 3, 4)
def test_results_are_returned(comm):
    def chief(coordinator):
        data = np.arange(6.0).reshape(2, 3)
        results = [coordinator.schedule(np.multiply, (data, number)) for number in range(20)]
        results.append(coordinator.schedule(dict, kwargs={"pair": (data.T, "text")}))
        data[:] = -1  # the scheduled closure has its own copy
        coordinator.join()
        assert coordinator.done()
        wanted = np.arange(6.0).reshape(2, 3)
        for number, value in enumerate(coordinator.fetch(results[:-1])):
            np.testing.assert_array_equal(value, wanted * number)
        pair = results[-1].get()["pair"]
        np.testing.assert_array_equal(pair[0], wanted.T)
        assert pair[1] == "text"
        assert coordinator.fetch({"a": [results[0], 7]})["a"][1] == 7

    coordinated(comm, chief)


def own_rank(delay=0.0):
    time.sleep(delay)
    return HERE["rank"]


@pytest.mark.ranks(2, 3, 4)
def test_functions_run_on_all_workers_only(comm):
    def chief(coordinator):
        results = [coordinator.schedule(own_rank, (0.05,)) for _ in range(4 * comm.size)]
        assert set(coordinator.fetch(results)) == set(range(1, comm.size))

    coordinated(comm, chief)


def two_contexts():
    """The contexts of a scheduled function, and of a function that it passes to `run`."""
    strategy, replica = strategies.get_strategy(), strategies.get_replica_context()
    seen = [strategy is HERE["strategy"], replica.num_replicas_in_sync]

    def inner(number):
        context = strategies.get_replica_context()
        return number * (context.strategy is strategy) + context.replica_id_in_sync_group

    seen.append(strategy.run(inner, args=(5,)))
    seen.append(strategy.reduce(ReduceOp.SUM, np.array([1.0, 2.0]), axis=0))
    return [*seen, strategies.get_replica_context() is replica]


@pytest.mark.ranks(2, 3)
def test_a_function_runs_as_a_replica_and_may_run_another(comm):
    def chief(coordinator):
        assert coordinator.schedule(two_contexts).fetch() == [True, 1, 5, 3.0, True]
        strategy = coordinator.strategy
        assert coordinator.schedule(lambda: strategy is HERE["strategy"]).fetch()

    coordinated(comm, chief)


def fail(number):
    raise KeyError(number)


@pytest.mark.ranks(2, 3)
def test_an_error_surfaces_once_with_its_place(comm):
    def chief(coordinator):
        failing = coordinator.schedule(fail, (7,))
        with pytest.raises(KeyError, match="7") as caught:
            coordinator.join()
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteTracebackError)
        assert cause.place in names_of_workers(comm).values()
        assert "in fail" in str(cause)
        coordinator.join()
        assert coordinator.done()
        with pytest.raises(KeyError, match="7"):
            failing.get()
        assert coordinator.schedule(own_rank).get() > 0

    coordinated(comm, chief)


@pytest.mark.ranks(2)
def test_an_error_cancels_what_waits(comm):
    def chief(coordinator):
        _, *others = [
            coordinator.schedule(sleep_and_fail, (2,)),
            *(coordinator.schedule(own_rank) for _ in range(3)),
        ]
        with pytest.raises(KeyError):
            coordinator.join()
        for other in others:
            with pytest.raises(CancelledError, match="another one failed: KeyError"):
                other.fetch()

    coordinated(comm, chief)


def sleep_and_fail(seconds):
    time.sleep(seconds)
    fail("late")


def take(iterator):
    return HERE["rank"], int(next(iterator))


def numbers(count):
    HERE["calls"].append(count)
    return [100 * HERE["rank"] + number for number in range(count)]


@pytest.mark.ranks(2, 3)
def test_every_worker_creates_its_own_dataset_once(comm):
    def chief(coordinator):
        dataset = coordinator.create_per_worker_dataset(partial(numbers, 4))
        unused = coordinator.create_per_worker_dataset(fail)
        assert unused is not dataset
        iterator = iter(dataset)
        taken = coordinator.fetch([coordinator.schedule(take, (iterator,)) for _ in range(4)])
        again = coordinator.schedule(take, kwargs={"iterator": iter(dataset)}).fetch()
        for rank in range(1, comm.size):
            own = [number for where, number in taken if where == rank]
            assert own == [100 * rank + number for number in range(len(own))]
        assert again[1] == 100 * again[0]
        results = [coordinator.schedule(calls, (0.05,)) for _ in range(4 * comm.size)]
        counts = dict(coordinator.fetch(results))
        assert all(each == [4] for rank, each in counts.items() if rank in dict(taken))

    coordinated(comm, chief)


def calls(delay):
    time.sleep(delay)
    return HERE["rank"], HERE["calls"]


@pytest.mark.ranks(2)
def test_the_end_of_a_dataset_is_an_ordinary_error(comm):
    def chief(coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(np.arange(2)))
        assert coordinator.schedule(sum, (iterator,)).fetch() == 1
        last = coordinator.schedule(take, (iterator,))
        with pytest.raises(OutOfRangeError):
            coordinator.join()
        with pytest.raises(OutOfRangeError):
            last.fetch()
        with pytest.raises(TypeError, match="give it to `schedule`"):
            next(iterator)
        coordinator.join()

    coordinated(comm, chief)


@pytest.mark.ranks(2)
def test_a_dataset_function_that_fails_is_called_again(comm):
    def chief(coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(fail_at_first))
        coordinator.schedule(take, (iterator,))
        with pytest.raises(ValueError, match="not yet"):
            coordinator.join()
        assert coordinator.schedule(take, (iterator,)).get() == (1, 8)

    coordinated(comm, chief)


def fail_at_first():
    HERE["calls"].append(None)
    if len(HERE["calls"]) == 1:
        raise ValueError("not yet")
    return [8, 9]


@pytest.mark.ranks(2)
def test_results_may_be_changed_and_do_not_change_later(comm):
    def chief(coordinator):
        first, second = (coordinator.schedule(count_up, (100_000,)) for _ in range(2))
        value = first.get()
        second.get()
        assert (value == 1).all()
        value[:] = 3
        assert (second.get() == 2).all()

    coordinated(comm, chief)


def count_up(length):
    """One array for all calls."""
    array = HERE.setdefault("array", np.zeros(length))
    array += 1
    return array


@pytest.mark.ranks(2)
def test_what_is_refused(comm):
    def chief(coordinator):
        strategy = coordinator.strategy
        assert coordinator is ClusterCoordinator(strategy)
        value = coordinator.schedule(own_rank)
        for wrong in ({"args": (value,)}, {"kwargs": {"x": [value]}}):
            with pytest.raises(ValueError, match="RemoteValue"):
                coordinator.schedule(own_rank, **wrong)
        with pytest.raises(ValueError, match="RemoteValue"):
            coordinator.schedule(lambda: value.get())
        with pytest.raises(TypeError, match="fn=5"):
            coordinator.schedule(5)
        with pytest.raises(TypeError, match="belongs to the chief"):
            coordinator.schedule(lambda: coordinator)
        plain = Variable(1.0)
        with pytest.raises(TypeError, match=r"belongs to <DefaultStrategy.*: workers can't reach"):
            coordinator.schedule(lambda: plain.numpy())
        with pytest.raises(TypeError, match="can't be sent"):
            coordinator.create_per_worker_dataset(i for i in range(3))
        with pytest.raises(ValueError, match="args=3"):
            coordinator.schedule(own_rank, 3)
        unsendable = coordinator.schedule(threading.Lock)
        with pytest.raises(TypeError, match="pickle"):
            unsendable.get()
        with pytest.raises(TypeError, match="pickle"):
            coordinator.done()
        assert value.get() == 1
        assert isinstance(value, RemoteValue)

    coordinated(comm, chief)


@pytest.mark.ranks(2)
def test_only_a_chief_of_workers_can_schedule(comm):
    with pytest.raises(ValueError, match="must be a ParameterServerStrategy"):
        ClusterCoordinator(MultiWorkerMirroredStrategy(communicator=Communicator(local.alone())))
    strategy = CoordinatedStrategy(comm)
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match="must be made by the chief, rank 0; this is rank 1"):
            ClusterCoordinator(strategy)
        serve_chief(strategy, strategy.link, lambda: None)
    else:
        strategy.staleness = 2
        with pytest.raises(ValueError, match="staleness=2: must be None where a ClusterCoord"):
            ClusterCoordinator(strategy)
        strategy.link.end()  # without a coordinator, too
    strategy.link.box.close()


@pytest.mark.ranks(2, 3)
def test_after_the_end_nothing_is_scheduled(comm):
    def chief(coordinator):
        coordinator.strategy.link.end()
        with pytest.raises(RuntimeError, match="the chief has called shutdown"):
            type(coordinator)(coordinator.strategy)
        for call in (coordinator.join, coordinator.done, partial(coordinator.schedule, own_rank)):
            with pytest.raises(CancelledError, match="the coordinator has ended"):
                call()

    coordinated(comm, chief)
