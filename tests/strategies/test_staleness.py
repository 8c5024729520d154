"""Stale synchronous parallel training: the limit of a worker's lead."""

import time

import numpy as np
import pytest

from collectives import DeadlineExceededError, MismatchError
from strategies import Variable, optimizers
from strategies.parameter_server import ParameterServerStrategy
from strategies.parameter_server.server import Clock
from tests.strategies.parameter_servers import number_of, resolver_of, run_workers, together

STEPS = 12


def test_the_clock():
    clock = Clock([3, 5])
    assert clock.slowest() == [3, 5]
    clock.tick(3)
    clock.tick(3)
    clock.tick(5)
    assert (clock.ahead(3), clock.ahead(5), clock.slowest()) == (1, 0, [5])
    clock.leave(5)
    clock.tick(5)
    assert (clock.ahead(3), clock.ahead(5), clock.slowest()) == (0, 0, [3])
    clock.leave(3)
    assert clock.slowest() == []


def steps_of(strategy, pause, steps=STEPS):
    """Train, and note how many steps each worker had pushed whenever a step of this one is done."""
    number, workers = number_of(strategy), len(strategy.roles.workers)
    done = Variable(np.zeros(workers))
    optimizer = optimizers.SGD(1.0)
    gradient = np.zeros(workers)
    gradient[number] = -1
    together(strategy)
    seen = []
    for _ in range(steps):
        time.sleep(pause)
        strategy.run(optimizer.apply_gradients, args=([(gradient, done)],))
        seen.append(done.numpy().copy())
    return seen


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("staleness", [0, 2])
def test_no_worker_is_further_ahead_than_allowed(comm, staleness):
    def work(strategy):
        slow = number_of(strategy) == 1
        return steps_of(strategy, 0.02 if slow else 0.0)

    results = run_workers(comm, 1, work, staleness=staleness)
    ahead = []
    for number, seen in enumerate(results):
        for step, counts in enumerate(seen, 1):
            assert counts[number] == step
            # Others may have finished their last step.
            ahead.append(step - min(counts))
    assert max(ahead) == staleness


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_without_a_bound_no_worker_waits(comm):
    def work(strategy):
        if number_of(strategy) == 1:
            return steps_of(strategy, 0.2)
        return steps_of(strategy, 0.0)

    fast, _ = run_workers(comm, 1, work)
    assert fast[-1][1] < STEPS / 2


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
def test_a_worker_that_has_finished_blocks_no_other(comm):
    def work(strategy):
        if number_of(strategy) == 1:
            steps_of(strategy, 0.0, steps=2)
            strategy.shutdown()
            return None
        return steps_of(strategy, 0.0)

    first, left, *_ = run_workers(comm, 1, work, staleness=1)
    assert left is None
    assert first[-1][0] == STEPS


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_waiting_obeys_the_deadline_and_names_the_slow(comm):
    def work(strategy):
        variable, optimizer = Variable(1.0), optimizers.SGD(1.0)
        if number_of(strategy) == 1:
            together(strategy)
            return True
        before, comm.deadline = comm.deadline, 2
        with pytest.raises(DeadlineExceededError, match=r"too far ahead.*rank 2") as raised:
            strategy.run(optimizer.apply_gradients, args=([(1.0, variable)],))
        assert raised.value.absent == (2,)
        comm.deadline = before
        together(strategy)
        return True

    assert all(run_workers(comm, 1, work, staleness=0))


@pytest.mark.mpi
@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [({"staleness": -1}, "staleness=-1"), ({"variable_partitioner": 3}, "must be a function, or")],
)
def test_a_wrong_argument_of_one_rank_is_an_error_on_every_rank(comm, wrong, text):
    given = wrong if comm.rank == comm.size - 1 else {}
    with pytest.raises((MismatchError, TypeError, ValueError), match=text):
        ParameterServerStrategy(resolver_of(comm.rank, comm.size, 1), communicator=comm, **given)
