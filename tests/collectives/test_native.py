"""MPI's own collectives: calls that only one rank's MPI would refuse don't reach it."""

import sys
import textwrap

import numpy as np
import pytest

from tests.collectives.oracle import value

pytest.importorskip("mpi4py.MPI", reason="there is no MPI")
from collectives.transports import mpi_native
from tests.slow import slow_but

pytestmark = pytest.mark.both_mpis

of_few_ranks = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def few(test):
    for mark in of_few_ranks:
        test = mark(test)
    return test


def native(comm, collective, source, target, lengths=(), root=0):
    """MPI's own collective, on the engine's buffers."""
    op = "sum" if collective in ("all_reduce", "reduce", "reduce_scatter") else None
    run = comm._engine.transport.native(collective, op, target.dtype)
    run(source, target, lengths, root)


@few
@pytest.mark.parametrize("algorithm", ["native", None])
def test_an_empty_block_that_lies_in_the_input(comm, algorithm):
    """Nothing forced: the fastest path is measured, including the native one."""
    for number in range(12):
        rows = np.full((1, 4096), comm.rank + number + 1.0)
        out = rows[:1] if comm.rank == 0 else rows[1:]
        comm.reduce_scatter(rows, out=out, algorithm=algorithm)
        if comm.rank == 0:
            assert (out == sum(rank + number + 1 for rank in range(comm.size))).all()


@few
def test_an_empty_input_that_lies_in_the_output(comm):
    out = np.zeros((comm.size - 1, 5))
    given = out[1:1] if comm.rank == 0 else np.full((1, 5), float(comm.rank))
    comm.all_gather(given, out=out, algorithm="native")
    np.testing.assert_array_equal(out[:, 0], np.arange(1, comm.size))
    nothing = np.ones(0)
    assert comm.all_reduce(nothing, out=nothing[:], algorithm="native").shape == (0,)


@few
def test_every_collective_of_empty_buffers_at_one_address(comm):
    """Of all ranks, and of all but one."""
    memory = np.full(8, comm.rank + 1.0)
    nothing = memory[:0]
    for collective in ("all_reduce", "reduce"):
        for root in range(comm.size):
            native(comm, collective, nothing, nothing, root=root)
    for length in (0, 3):
        lengths = [0] * comm.size
        lengths[-1] = length
        last = comm.rank == comm.size - 1
        source = np.full(length, comm.rank + 1.0)
        target = source.copy() if last else source[:0]
        native(comm, "reduce_scatter", source, target, lengths)
        if last:
            assert (target == comm.size * (comm.size + 1) / 2).all()
        target = np.zeros(length)
        native(comm, "all_gather", source if last else target[:0], target, lengths)
        assert (target == comm.size).all()
        for root in range(comm.size):
            on_root = comm.rank == root
            part = np.full(length, 7.0) if last else nothing
            target = np.zeros(length) if on_root else part
            if not length:
                part = target = nothing
            native(comm, "gather", part, target, lengths, root)
            assert (target == 7).all()
            whole = (np.full(length, 8.0) if length else nothing) if on_root else None
            part = np.zeros(length) if last else nothing
            native(comm, "scatter", whole, part, lengths, root)
            assert (part == 8).all()
    # Only the last rank sends anything, and only to the first.
    lengths = [0] * 2 * comm.size
    if comm.rank == comm.size - 1:
        lengths[0] = 4
    if comm.rank == 0:
        lengths[2 * comm.size - 1] = 4
    buffer = np.full(sum(lengths), comm.rank + 1.0)
    native(comm, "all_to_all", None, buffer, lengths)
    assert (buffer == comm.size).all()


@few
def test_more_than_an_older_mpi_counts(comm, monkeypatch):
    """One rank may send or receive so much in an all_to_all; in others all ranks know the size."""
    monkeypatch.setattr(mpi_native, "_COUNTS_ALL", False)
    monkeypatch.setattr(mpi_native, "_LARGEST_COUNT", 5000)
    blocks = [value(comm.rank + peer, 64) for peer in range(comm.size)]
    if comm.rank == 0:
        blocks[1] = value(5, 1000)
    received = comm.all_to_all(blocks, algorithm="native")
    for peer, block in enumerate(received):
        large = peer == 0 and comm.rank == 1
        np.testing.assert_array_equal(
            block, value(5, 1000) if large else value(comm.rank + peer, 64)
        )
    rows = value(comm.rank, 1000 if comm.rank == 0 else 3)
    with pytest.raises(
        ValueError, match=r"algorithm='native': gather of \d+ bytes: this MPI counts"
    ):
        comm.gather(rows, algorithm="native")
    assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3


def test_what_one_ranks_mpi_refuses_all_the_same(launch):
    """That rank can make no further call, and at the deadline the job ends."""
    body = """
    import numpy as np
    from mpi4py import MPI
    import collectives
    from collectives.transports import mpi_native
    from collectives.waiting import watchdog

    comm = collectives.world()
    comm.barrier()
    watchdog.GRACE_SECONDS = 0.2
    comm.deadline = 2

    def refused(comm, op, source, target, lengths, root):
        comm.Allreduce([source, MPI.DOUBLE], [target, MPI.DOUBLE], MPI.BAND)

    if comm.rank == 1:
        mpi_native._REDUCTIONS["all_reduce"] = refused
    try:
        comm.all_reduce(np.ones(5000), algorithm="native")
    except collectives.CollectiveError as error:
        print(error, flush=True)
    try:
        comm.barrier()
    except RuntimeError as error:
        print(error, flush=True)
    import time
    time.sleep(60)
    """
    ended = launch(2, [sys.executable, "-c", textwrap.dedent(body)], timeout=90)
    assert ended.returncode != 0
    assert "MPI refused this rank's part of all_reduce: " in ended.stdout
    assert "the communicator can't go on: MPI refused" in ended.stdout
    assert "rank 0" in ended.stderr
    assert "inside a library (MPI or NCCL) for the deadline of 2 s" in ended.stderr


# What rank 1 stops before, the call, and its name in the message.
STOPS = {
    "share": ("comm.split(0)", "the start of the communicator"),
    "reserve": ("comm.zeros(9)", "empty(float32[9])"),
    "free": ("comm.close()", "close()"),
}


@pytest.mark.parametrize("method", slow_but(STOPS, "share"))
def test_the_job_ends_where_a_rank_stops_inside_mpi(launch, method):
    """The others are inside of MPI, which makes or frees memory that ranks share."""
    call, name = STOPS[method]
    body = f"""
    import time
    import collectives
    from collectives.transports.mpi import MpiTransport
    from collectives.waiting import watchdog

    comm = collectives.world()
    comm.barrier()
    watchdog.GRACE_SECONDS = 0.2
    comm.deadline = 2
    stopped = MpiTransport.{method}
    if comm.rank == 1:
        MpiTransport.{method} = lambda self, given: (time.sleep(60), stopped(self, given))[1]
    {call}
    """
    ended = launch(2, [sys.executable, "-c", textwrap.dedent(body)], timeout=50)
    assert ended.returncode != 0
    assert f"rank 0: {name}" in ended.stderr
    assert "was inside a library (MPI or NCCL) for the deadline" in ended.stderr
