"""Ranks that fail, end early, are stopped or are forked: users' programs."""

import sys
import textwrap
import time

import pytest

from tests.slow import slow, slow_but
from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.programs import errors_of, run_programs

pytestmark = pytest.mark.both_mpis

START = """
import faulthandler, os, random, signal, subprocess, sys, threading, time
import numpy as np
import collectives
faulthandler.dump_traceback_later(55, exit=True)
comm = collectives.world(deadline=60)
from mpi4py import MPI
rank, size = comm.rank, comm.size
total = size * (size + 1) / 2


def check(length=10):
    assert (comm.all_reduce(np.full(length, rank + 1.0)) == total).all()


def stop_for(seconds):
    # Somebody else has to wake this process.
    line = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, 18)"
    waker = subprocess.Popen([sys.executable, "-S", "-c", line])
    os.kill(os.getpid(), signal.SIGSTOP)
    return waker


check()
check(50_000)
"""

GO_ON = {
    "small": "while True: check()",
    "large": "while True: check(50_000)",
    "barrier": "while True: comm.barrier()",
    "asynchronous": "while True: comm.all_reduce_async(np.ones(5)).wait()",
    "two communicators": "other = comm.split(0)\n    while True: check()",
}


def program(body):
    return [sys.executable, "-c", START + textwrap.dedent(body)]


@pytest.mark.parametrize("call", slow_but(GO_ON, "small"))
@pytest.mark.parametrize("size", [3, *slow(2)])
def test_an_exit_on_one_rank_ends_the_job(size, call, launch):
    body = f"""
other = comm.split(0) if {call == "two communicators"} else None
if rank == size - 1:
    time.sleep(0.2)
    sys.exit(7)
else:
    {GO_ON[call].replace("other = comm.split(0)", "pass")}
"""
    start = time.monotonic()
    ended = launch(size, program(body), timeout=80)
    assert ended.returncode != 0
    assert "CollectiveMismatchError" in ended.stderr
    assert "exit(): the program has ended, after fewer calls than on other ranks" in ended.stderr
    assert time.monotonic() - start < 50


def test_a_rank_that_returns_early_tells_the_others_at_every_call(launch):
    body = """
if rank != 0:
    for _ in range(20):
        try:
            check()
        except collectives.CollectiveMismatchError as error:
            assert error.calls[0] == "exit()", error.calls
        else:
            raise AssertionError("no error")
"""
    ended = launch(3, program(body), timeout=80)
    assert (ended.returncode, ended.stdout, errors_of(ended)) == (0, "", "")


@pytest.mark.parametrize("call", ["large", *slow("small")])
@pytest.mark.parametrize("size", [3, *slow(2, 5)])
def test_a_killed_rank_ends_the_job(size, call, launch):
    body = f"""
if rank == size - 1:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
print("begun", flush=True)
{GO_ON[call]}
"""
    start = time.monotonic()
    ended = launch(size, program(body), timeout=80)
    assert ended.returncode != 0
    assert "begun" in ended.stdout, ended.stderr
    assert "AssertionError" not in ended.stderr
    assert "NameError" not in ended.stderr
    assert time.monotonic() - start < 50


@pytest.mark.skipif(
    not is_open_mpi(find_mpirun() or "mpirun"), reason="MPICH ends the job with any of its ranks"
)
@pytest.mark.parametrize("call", ["small", "large"])
def test_a_rank_dies_and_the_job_lives(call):
    body = f"""
comm.barrier()
start = time.monotonic()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    {GO_ON[call]}
except collectives.RankFailedError as error:
    assert "rank 1" in str(error) and "died" in str(error), error
    assert time.monotonic() - start < 12
try:
    check()
except RuntimeError as error:
    print("refused", flush=True)
sys.exit(0)  # MPI_Finalize might wait for ever
"""
    ended = run_programs([(3, program(body))], timeout=60, options=["--with-ft", "ulfm"])
    assert ended.stdout.count("refused") == 2, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, *slow(2)])
def test_a_rank_that_stops_for_a_while(size, launch):
    body = """
warnings = []
import logging
class Keep(logging.Handler):
    def emit(self, record): warnings.append(record.getMessage())
logging.getLogger("collectives").addHandler(Keep())
comm.deadline = 10
comm.barrier()
waker = stop_for(1.5) if rank == 0 else None
check()
if rank != 0:
    assert any("rank 0" in each for each in warnings), warnings
comm.barrier()
# In the middle of a call: at some moment of several large ones.
if rank == 0:
    threading.Timer(0.05, lambda: stop_for(1.5)).start()
for number in range(30):
    check(2_000_000)
time.sleep(0.1)
comm.barrier()
"""
    ended = launch(size, program(body), timeout=80)
    assert (ended.returncode, errors_of(ended)) == (0, "")


@pytest.mark.parametrize("call", ["large", *slow("small", "barrier", "one by one")])
def test_an_interrupt_of_one_rank_that_waits_ends_its_calls(call, launch):
    """The others may have seen it arrive: what they wait for is unknown."""
    calls = {
        "small": "check()",
        "large": "check(50_000)",
        "barrier": "comm.barrier()",
        "one by one": "comm.all_reduce(np.full(9, 1), algorithm='ring')",
    }
    body = f"""
comm.deadline = 5
if rank == 0:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        {calls[call]}
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("not interrupted")
    for again in (check, lambda: check(50_000), comm.barrier):
        try:
            again()
        except RuntimeError as error:
            assert "can't go on" in str(error), error
        else:
            raise AssertionError("went on")
else:
    time.sleep(3)
"""
    ended = launch(2, program(body), timeout=80)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("size", [3, *slow(2)])
@pytest.mark.parametrize(
    ("way", "step"),
    [("staged", "mark_written"), pytest.param("single_copy", "barrier", marks=pytest.mark.slow)],
)
def test_a_rank_that_stops_beyond_the_deadline_in_the_middle_of_a_call(size, way, step, launch):
    body = f"""
comm.deadline = 1.5
engine = comm._engine
native = engine.node.steps.{step}
def stop_here():
    engine.node.steps.{step} = native
    stop_for(5).wait()
    native()
if rank == 0:
    engine.node.steps.{step} = stop_here
try:
    comm.all_reduce(np.full(500_000, rank + 1.0), algorithm="{way}")
except collectives.DeadlineExceededError as error:
    assert "in the middle of the call" in str(error), error
    assert error.absent == (0,) or rank == 0, error.absent
else:
    assert rank == 0
for call in (check, lambda: check(50_000), comm.barrier, lambda: comm.split(0),
             lambda: comm.all_reduce_async(np.ones(3)), lambda: comm.empty(3)):
    if rank != 0:
        try:
            call()
        except RuntimeError as error:
            assert "can't go on" in str(error), error
        else:
            raise AssertionError("went on")
comm.close() if rank else None
"""
    ended = launch(size, program(body), timeout=80)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_rank_that_stops_inside_mpis_own_collective_ends_the_job(launch):
    body = """
comm.deadline = 1.0
start = time.monotonic()
if rank == 1:
    engine = comm._engine
    paths = engine.paths("all_reduce", collectives.ReduceOp.SUM, np.dtype(float))
    paths["native"] = lambda *arguments: stop_for(30)
comm.all_reduce(np.full(50_000, rank + 1.0), algorithm="native")
"""
    start = time.monotonic()
    ended = launch(2, program(body), timeout=80)
    assert ended.returncode != 0
    assert time.monotonic() - start < 15
    assert "inside a library (MPI or NCCL) for the deadline of 1 s" in ended.stderr
    assert "all_reduce(sum, float64[50000], algorithm=native)" in ended.stderr
    assert "(<string>:" in ended.stderr


CHILD_ENDS = {"sys.exit(3)": 3, "os._exit(3)": 3, "raise KeyError('child')": 1, "pass": 0}


@pytest.mark.parametrize("end", slow_but(CHILD_ENDS, "raise KeyError('child')"))
def test_a_forked_child(end, launch):
    body = f"""
comm.all_reduce_async(np.ones(3)).wait()
pending = comm.all_reduce_async(np.ones(3)) if comm.rank == 0 else None
wait = comm.barrier if pending is None else pending.wait
calls = (wait, check, lambda: check(50_000), comm.barrier, comm.close, lambda: comm.empty(3),
         lambda: comm.all_reduce_async(np.ones(3)), lambda: comm.split(0),
         lambda: comm.send(np.ones(1), 0), lambda: comm.recv(np.ones(1), 0),
         lambda: collectives.Communicator(sys.modules["mpi4py.MPI"].COMM_WORLD))
child = os.fork()
if child == 0:
    sys.stderr = open(os.devnull, "w")
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            assert "forked" in str(error), error
        else:
            os._exit(77)
    {end}
    sys.exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
comm.barrier()
pending = pending or comm.all_reduce_async(np.ones(3))
assert pending.wait(float("inf")).tolist() == [2, 2, 2]
assert code == {CHILD_ENDS[end]}, code
check()
check(50_000)
comm.all_reduce_async(np.ones(3)).wait()
"""
    ended = launch(2, program(body), timeout=80)
    assert (ended.returncode, ended.stdout, errors_of(ended)) == (0, "", "")


def test_without_a_way_to_order_stores_a_late_call_is_undecided(launch):
    body = """
from collectives.errors import UnusableError
from collectives.shm import node_barrier
node_barrier.order_all_threads = lambda: False
comm.deadline = 0.5
if rank == 1:
    for error in (collectives.DeadlineExceededError, UnusableError):
        # Rank 0 may use the first call's data, so there is no second one, with others.
        try:
            check()
        except error as caught:
            assert not getattr(caught, "withdrawn", False)
        else:
            raise AssertionError(error)
    MPI.COMM_WORLD.Barrier()
else:
    MPI.COMM_WORLD.Barrier()
    check()
"""
    ended = launch(2, program(body), timeout=80)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_a_child_that_is_forked_after_the_end(launch):
    body = """
comm.close()
for status in (1, 3):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if status == 1:
            collectives.world()
        sys.stdout.close()
        sys.exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
"""
    ended = launch(2, program(body), timeout=80)
    assert (ended.returncode, ended.stdout, errors_of(ended)) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, *slow(2)])
def test_two_threads_at_once(size, launch):
    body = """
failed = []
def calls(length):
    try:
        for _ in range(100):
            check(length)
    except BaseException as error:
        failed.append(error)
for length in (10, 50_000):
    threads = [threading.Thread(target=calls, args=(length,)) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
assert not failed, failed
"""
    ended = launch(size, program(body), timeout=80)
    assert (ended.returncode, errors_of(ended)) == (0, "")
