"""Ranks on several hosts, without common memory, over TCP."""

import textwrap

import pytest

from tests.slow import slow_but
from tests.worlds import hosts

REASON = hosts.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no hosts can be imitated: {REASON}")

START = """
import faulthandler, platform
import numpy as np
faulthandler.dump_traceback_later(40, exit=True)
import collectives
comm = collectives.world(deadline=30)
from mpi4py import MPI
rank, size = comm.rank, comm.size
total = size * (size + 1) / 2
"""


@pytest.fixture(scope="module")
def two():
    with hosts.hosts(2) as made:
        yield made


def run(two, ranks, body):
    ended = hosts.run_on_hosts(*two, ranks, START + textwrap.dedent(body), timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.mark.parametrize("ranks", slow_but([(1, 1), (2, 1), (2, 2), (3, 2)], (2, 1)))
def test_collectives_between_hosts(two, ranks):
    run(
        two,
        ranks,
        """
        names = comm.all_gather_object(platform.node())
        assert comm.nodes == len(set(names)) == 2, names
        assert comm.local_size == names.count(platform.node())
        for length in (1, 1000, 30_000, 400_001):
            array = np.full(length, rank + 1.0)
            for _ in range(3):
                assert (comm.all_reduce(array) == total).all()
            registered = comm.empty(length, float)
            registered[:] = rank + 1
            comm.all_reduce(registered, out=registered)
            assert (registered == total).all()
            joined = comm.all_gather(np.full(length, rank))
            assert (joined == np.repeat(np.arange(size), length)).all()
            block = np.full(length, rank)
            for root in (0, size - 1):
                block[:] = rank
                comm.broadcast(block, root=root)
                assert (block == root).all()
            parts = comm.reduce_scatter(array)
            assert (parts == total).all()
        results = comm.all_reduce_many([np.full(3, rank + 1.0), np.full((2, 50), rank + 1)])
        assert (results[0] == total).all() and (results[1] == total).all()
        assert (comm.all_reduce_async(np.full(9, rank + 1.0)).wait() == total).all()
        comm.close()
        """,
    )


def test_a_mismatch_between_hosts_is_told_to_all_and_the_next_call_works(two):
    run(
        two,
        (2, 2),
        """
        for wrong in (0, size - 1):
            try:
                comm.all_reduce(np.ones(3 + (rank == wrong)))
            except collectives.ShapeMismatchError as error:
                assert "[4]" in error.calls[wrong], error.calls
            else:
                raise AssertionError("no error")
            assert comm.all_reduce(np.full(3, rank + 1.0))[0] == total
        """,
    )


def test_a_rank_of_another_host_that_does_not_come(two):
    run(
        two,
        (2, 1),
        """
        import time
        comm.deadline = 1.0
        if rank == 2:
            time.sleep(2.5)
        else:
            try:
                comm.barrier()
            except collectives.DeadlineExceededError as error:
                assert error.absent == (2,), error.absent
            else:
                raise AssertionError("no error")
        # A rank that repeated the call at once could complete it with one that still waits.
        arrived = MPI.COMM_WORLD.Ibarrier()
        while not arrived.Test():
            time.sleep(0.001)
        comm.deadline = 20
        comm.barrier()
        """,
    )
