"""What a parameter server stores of the chief's announcements."""

import contextlib

import numpy as np
import pytest

from strategies import Variable
from strategies.coordinator import ClusterCoordinator
from strategies.parameter_server.announcements import KeyValueStore
from tests.strategies.parameter_servers import strategy_on, together
from tests.strategies.support import refusal


def test_an_announcement_is_stored_until_all_have_found_it():
    announced = KeyValueStore([3, 5])
    for number in range(4):
        announced.put(("action", number), bytes([number]))
    announced.put(("variable", 0), b"v")
    for number in range(4):
        assert announced.get(("action", number)) == bytes([number])
        assert announced.get(("action", number)) == bytes([number]), "requested again"
        announced.found(3, ("action", number))
    assert len(announced) == 5
    announced.found(5, ("action", 1))
    assert len(announced) == 3
    announced.leave(5)
    assert len(announced) == 1
    assert announced.get(("action", 4)) is None
    assert announced.get(("variable", 0)) == b"v"
    announced.put(("action", 4), b"4")
    assert announced.get(("action", 4)) == b"4"
    announced.found(3, ("action", 4))
    assert len(announced) == 1
    announced.found(5, ("variable", 0))
    assert len(announced) == 1, "of one that has left"
    announced.leave(3)
    announced.leave(3)
    announced.put(("action", 5), b"5")
    assert len(announced) == 0


READ_HERE = []


class Told:
    """Records where it is unpickled."""

    def __reduce__(self):
        return note_reading, ()


def note_reading():
    READ_HERE.append(True)


@contextlib.contextmanager
def watched(strategy):
    """The number of announcements that the server stores after each new one."""
    announced, kept = strategy._server._announced, []
    put = announced.put

    def watched_put(key, value):
        put(key, value)
        kept.append(len(announced))

    announced.put = watched_put
    yield kept


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_a_server_neither_keeps_nor_reads_what_all_have_heard(comm):
    READ_HERE.clear()
    with strategy_on(comm, 1) as strategy:
        if comm.rank == 0:
            with watched(strategy) as kept:
                strategy.serve()
            assert len(kept) == 20
            # The next one may arrive before the push of a worker that has found this one.
            assert max(kept) <= (2 if comm.size > 2 else 0)
            assert not READ_HERE
        else:
            for _ in range(20):
                strategy.chief_first(Told)
                together(strategy)
            assert len(READ_HERE) == (0 if strategy.is_chief else 20)
            strategy.shutdown()
        comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(3, 4)
def test_workers_that_serve_the_chief_get_no_announcements_and_create_nothing(comm):
    with strategy_on(comm, 1, chief=True) as strategy:
        if strategy.is_chief:
            with strategy.scope():
                variable = Variable(np.zeros(3))
            coordinator = ClusterCoordinator(strategy)
            coordinator.schedule(variable.assign_add, (np.ones(3),)).get()
            for _ in range(20):
                strategy.chief_first(lambda: None)
            made = coordinator.schedule(lambda: Variable(np.zeros(3)))
            refusal(RuntimeError, "serves the chief", made.get)
            refusal(RuntimeError, "serves the chief", coordinator.join)
            strategy.shutdown()
        elif comm.rank == 0:
            with watched(strategy) as kept:
                strategy.serve()
            assert len(kept) == 21
            assert kept[-1] == 0
        else:
            strategy.serve()
        strategy.link.box.close()
