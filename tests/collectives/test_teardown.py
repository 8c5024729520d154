"""How programs end, and what is left in what state."""

import os
import sys
import textwrap

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, DeadlineExceededError, MismatchError, RankFailedError
from collectives.transports import local
from tests.slow import slow_but

pytestmark = pytest.mark.both_mpis

START = """
import faulthandler, sys, time
import numpy as np
import collectives
faulthandler.dump_traceback_later(40, exit=True)
comm = collectives.world(deadline=60)
from mpi4py import MPI
rank, size = comm.rank, comm.size
comm.all_reduce(np.ones(10))
comm.all_reduce(np.ones(50_000))
"""

QUIET_ENDS = {
    "without close": "",
    "closed": "comm.close()\ncomm.close()\nassert comm.closed",
    "a with block": "with comm: comm.barrier()\nassert comm.closed",
    "pending calls": "handles = [comm.all_reduce_async(np.ones(1000)) for _ in range(9)]",
    "dropped calls, closed": "comm.all_reduce_async(np.ones(100_000)); comm.close()",
    "registered arrays alive": "array = comm.empty(100_000); array[:] = 1; comm.all_reduce(array)",
    "registered arrays outlive": """
array = comm.empty(100_000)
comm.close()
array[:] = rank
assert (array == rank).all()
""",
    # Open MPI frees windows in the order of its table in MPI_Finalize, whose free places it reuses.
    "registered arrays of overlapping groups": """
last = comm.split(None if rank == 0 else 0)
if last is not None: last.empty(1000)
first = comm.split(None if rank == 2 else 0)
kept = [first and first.empty(1000)]
if last is not None: last.close()
first = comm.split(None if rank == 2 else 0)
kept.append(first and first.empty(1000))
""",
    "several broken communicators with asynchronous calls": """
groups = [collectives.Communicator(MPI.COMM_WORLD, deadline=20) for _ in range(6)]
for group in groups:
    group.all_reduce_async(np.ones(3)).wait()
    group._engine.broken = RuntimeError("broken on every rank")
""",
    # Longer than the first wait: they must not follow each other through all communicators.
    "many communicators on a rank that comes late": """
groups = [collectives.Communicator(MPI.COMM_WORLD, deadline=60) for _ in range(60)]
if rank == 0:
    time.sleep(1.5)
""",
    "a mailbox": """
box = comm.mailbox()
box.send((rank + 1) % size, "hello", [np.ones(200_000)])
assert box.receive().arrays[0].sum() == 200_000
""",
    "a mailbox of messages that nobody takes": """
box = comm.mailbox()
sent = [box.send(peer, "hello", [np.ones(200_000)]) for peer in range(size)]
""",
    "a mailbox, closed with the communicator": """
box = comm.mailbox()
sent = [box.send(peer, "hello", [np.ones(200_000)]) for peer in range(size)]
comm.close()
assert all(each.done() for each in sent)
""",
    "a mailbox in which one rank waits when the others end": """
box = comm.mailbox()
if rank == 0:
    try: box.receive()
    except collectives.RankFailedError as error: assert "rank 1 has closed" in str(error), error
    else: sys.exit("no error")
""",
    "a mailbox that one rank closes when the others end": """
box = comm.mailbox()
if rank == 0: box.close()
""",
    "several communicators": """
parts = [comm.split(rank % 2), comm.split(0), collectives.Communicator(MPI.COMM_WORLD)]
for part in parts:
    part.barrier()
    part.all_reduce_async(np.ones(5))
""",
    "one rank much later": "split = comm.split(0)\nif rank == 0: time.sleep(2.5)",
    "one rank much later, closed": "if rank == 0: time.sleep(1)\ncomm.close()",
    "finalised by hand": "comm.all_reduce_async(np.ones(5)).wait()\nMPI.Finalize()",
    "a mismatch": """
try:
    comm.all_reduce(np.ones(rank + 1))
except collectives.ShapeMismatchError:
    handles = comm.all_reduce_async(np.ones(7))
else:
    sys.exit("no error")
""",
    "closed after an asynchronous mismatch": """
try:
    comm.all_reduce_async(np.ones(rank + 1)).wait()
except collectives.ShapeMismatchError:
    comm.close()
else:
    sys.exit("no error")
""",
    "one asynchronous call too many, closed": """
if rank == 0: handle = comm.all_reduce_async(np.ones(3))
comm.close()
if rank == 0:
    try: handle.wait()
    except collectives.CollectiveMismatchError as error: assert "close()" in error.calls[1]
    else: sys.exit("no error")
""",
}


def program(body):
    return [sys.executable, "-c", START + textwrap.dedent(body)]


BY_DEFAULT = (
    "a mailbox in which one rank waits when the others end",
    "a mismatch",
    "registered arrays of overlapping groups",
)


@pytest.mark.parametrize("end", slow_but(QUIET_ENDS, *BY_DEFAULT))
def test_a_program_that_ends_says_nothing(end, launch):
    ended = launch(3, program(QUIET_ENDS[end]), timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_calls_after_the_end_of_mpi(launch):
    body = """
    from mpi4py import MPI
    from collectives.transports import local

    comm.all_reduce(np.ones(2))
    comm.all_reduce_async(np.ones(2)).wait()
    box = comm.mailbox()

    class Alone(local.LocalTransport):
        one_process = threads = False

    def without_mpi():
        return collectives.Communicator(Alone(local._Switchboard(), "alone", 0, 1))

    before = without_mpi()
    MPI.Finalize()
    calls = {
        "all_reduce": lambda: comm.all_reduce(np.ones(2)),
        "all_reduce_async": lambda: comm.all_reduce_async(np.ones(2)),
        "send": lambda: comm.send(np.ones(2), 1 - rank),
        "split": lambda: comm.split(0),
        "mailbox": lambda: box.send(1 - rank, {}),
        "world": lambda: comm.close() or collectives.world(),
    }
    for each in (before, without_mpi()):
        assert each.all_reduce(np.ones(2)).sum() == 2
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert "MPI.Finalize was called" in str(error), (name, error)
        else:
            raise AssertionError(name)
    """
    ended = launch(2, program(body), timeout=60)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_an_end_after_a_deadline(launch):
    body = """
import logging
logging.getLogger("collectives").setLevel(logging.ERROR)
from tests.collectives.waiting import wait_for_all
comm.deadline = 1
if rank != 0:
    try: comm.all_reduce(np.ones(3))
    except collectives.DeadlineExceededError: pass
    try: comm.close()
    except collectives.DeadlineExceededError as error: assert error.absent == (0,), error.absent
    assert not comm.closed
wait_for_all()
comm.deadline = 60
comm.all_reduce(np.ones(3))
"""
    ended = launch(3, program(body), timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(10)),
    "large all_reduce": lambda comm: comm.all_reduce(np.ones(50_000)),
    "forced all_reduce": lambda comm: comm.all_reduce(np.ones(10), algorithm="ring"),
    "reduce": lambda comm: comm.reduce(np.ones(10)),
    "broadcast": lambda comm: comm.broadcast(np.ones(10)),
    "all_gather": lambda comm: comm.all_gather(np.ones(10)),
    "gather": lambda comm: comm.gather(np.ones(10)),
    "scatter": lambda comm: comm.scatter(np.ones(10)),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.ones(10)),
    "all_to_all": lambda comm: comm.all_to_all([np.ones(1)] * comm.size),
    "all_reduce_many": lambda comm: comm.all_reduce_many([np.ones(10)]),
    "persistent_all_reduce_many": lambda comm: comm.persistent_all_reduce_many([np.ones(10)])(),
    "barrier": lambda comm: comm.barrier(),
    "send": lambda comm: comm.send(np.ones(1), (comm.rank + 1) % comm.size),
    "recv": lambda comm: comm.recv(np.ones(1), (comm.rank + 1) % comm.size),
    "isend": lambda comm: comm.isend(np.ones(1), (comm.rank + 1) % comm.size),
    "irecv": lambda comm: comm.irecv(np.ones(1), (comm.rank + 1) % comm.size),
    "broadcast_object": lambda comm: comm.broadcast_object(1),
    "all_gather_object": lambda comm: comm.all_gather_object(1),
    "all_reduce_async": lambda comm: comm.all_reduce_async(np.ones(10)),
    "broadcast_async": lambda comm: comm.broadcast_async(np.ones(10)),
    "all_gather_async": lambda comm: comm.all_gather_async(np.ones(10)),
    "reduce_async": lambda comm: comm.reduce_async(np.ones(10)),
    "gather_async": lambda comm: comm.gather_async(np.ones(10)),
    "scatter_async": lambda comm: comm.scatter_async(np.ones(10)),
    "reduce_scatter_async": lambda comm: comm.reduce_scatter_async(np.ones(10)),
    "all_to_all_async": lambda comm: comm.all_to_all_async([np.ones(1)] * comm.size),
    "all_reduce_many_async": lambda comm: comm.all_reduce_many_async([np.ones(10)]),
    "scan": lambda comm: comm.scan(np.ones(10)),
    "exscan": lambda comm: comm.exscan(np.ones(10)),
    "scan_async": lambda comm: comm.scan_async(np.ones(10)),
    "exscan_async": lambda comm: comm.exscan_async(np.ones(10)),
    "barrier_async": lambda comm: comm.barrier_async(),
    "mailbox": lambda comm: comm.mailbox(),
    "empty": lambda comm: comm.empty(10),
    "zeros": lambda comm: comm.zeros(10),
    "empty_shared": lambda comm: comm.empty_shared(10),
    "split": lambda comm: comm.split(0),
    "trace": lambda comm: comm.trace(os.devnull),
    "explain": lambda comm: comm.explain("all_reduce", 80, "float64"),
    "tune": lambda comm: comm.tune(save=False),
}


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("nodes", [False, True])
def test_every_call_after_close(comm, nodes):
    node_of = [rank % 2 for rank in range(comm.size)] if nodes else None
    group = Communicator(MPI.COMM_WORLD, deadline=20, node_of=node_of)
    for name in ("all_reduce", "large all_reduce"):
        CALLS[name](group)
    group.all_reduce_async(np.ones(3)).wait()
    persistent = group.persistent_all_reduce_many([np.ones(10)])
    for _ in range(4):
        persistent()
    group.close()
    assert group.closed
    for call in (*CALLS.values(), lambda _: persistent()):
        with pytest.raises(RuntimeError, match="closed"):
            call(group)
    group.close()
    # As in a thread that has looked before another one closed it.
    group._check_open = lambda: None
    with pytest.raises(RuntimeError, match="closed"):
        group.all_reduce_async(np.ones(3))


@pytest.mark.parametrize("error", [DeadlineExceededError, MismatchError, RankFailedError])
def test_the_end_of_a_program_that_breaks_the_communicator(error):
    comm, ran = Communicator(local.alone()), []

    class Owner:
        def leave(self):
            ran.append(comm._engine.broken)

    def failing(name):
        comm._engine.break_off(error(name))
        raise comm._engine.broken

    owner = Owner()
    comm.at_end(owner.leave)
    comm._close = failing
    comm.finish()
    assert comm.close_at_exit(0.1)
    assert comm.closed
    comm.finish()
    assert ran == [None]


def test_every_method_is_tried():
    waits = {"close", "rank", "size", "node", "nodes", "local_rank", "local_size"}
    methods = {name for name in dir(Communicator) if not name.startswith("_")}
    # For what is to be done later.
    later = {"before_next_call", "at_end", "run_deferred", "finish"}
    rest = (
        methods
        - waits
        - later
        - {"backend", "closed", "deadline", "lost_rank", "unsent", "close_at_exit", "forbid"}
    )
    assert rest == {name for name in CALLS if " " not in name}
