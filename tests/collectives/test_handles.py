"""Asynchronous calls."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from tests.collectives.oracle import reduced, value, values
from tests.slow import slow, slow_but
from tests.worlds.programs import errors_of


@pytest.mark.mpi
def test_many_in_flight_with_blocking_calls_in_between(comm):
    handles = []
    for index in range(30):
        handles.append(comm.all_reduce_async(value(comm.rank + index, 50)))
        blocking = comm.all_reduce(value(comm.rank, 20), "max")
        np.testing.assert_array_equal(blocking, reduced("max", values(comm.size, 20)))
    for index, handle in reversed(list(enumerate(handles))):
        expected = reduced("sum", [value(rank + index, 50) for rank in range(comm.size)])
        np.testing.assert_array_equal(handle.wait(), expected)


@pytest.mark.mpi
def test_every_kind_and_waiting_twice(comm):
    out = np.empty(5)
    array = value(comm.rank, 5)
    root = comm.size - 1
    broadcast = value(comm.rank, 7)
    handles = [
        comm.all_reduce_async(array, "mean", out=out),
        comm.broadcast_async(broadcast, root=root),
        comm.all_gather_async(value(comm.rank, comm.rank + 1)),
    ]
    results = [handle.wait() for handle in handles]
    assert all(handle.done() for handle in handles)
    assert all(handle.wait() is result for handle, result in zip(handles, results, strict=True))
    assert results[0] is out
    np.testing.assert_array_equal(out, reduced("mean", values(comm.size, 5)))
    assert results[1] is broadcast
    np.testing.assert_array_equal(broadcast, value(root, 7))
    joined = np.concatenate([value(rank, rank + 1) for rank in range(comm.size)])
    np.testing.assert_array_equal(results[2], joined)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_it_returns_before_the_others_have_come(comm):
    if comm.rank == 0:
        handle = comm.all_reduce_async(value(0, 1000))
        assert not handle.done()
        with pytest.raises(TimeoutError):
            handle.wait(timeout=0.01)
        comm.barrier()
    else:
        comm.barrier()
        handle = comm.all_reduce_async(value(comm.rank, 1000))
    np.testing.assert_array_equal(handle.wait(10), reduced("sum", values(comm.size, 1000)))


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_progress_is_made_while_the_caller_computes(comm):
    """No call after the submission, until the other thread has completed it."""
    ended = threading.Event()
    handle = comm.all_reduce_async(value(comm.rank, 200_000))
    handle._future.add_done_callback(lambda future: ended.set())
    limit = time.monotonic() + 30
    while not ended.is_set() and time.monotonic() < limit:
        np.sin(np.ones(1000)).sum()
    assert ended.is_set()
    np.testing.assert_array_equal(handle.wait(0), reduced("sum", values(2, 200_000)))


@pytest.mark.mpi
def test_an_error_of_the_collective_is_raised_by_wait(comm):
    from collectives import ShapeMismatchError

    handle = comm.all_gather_async(np.ones((2, 1 + comm.rank)))
    if comm.size == 1:
        assert handle.wait().shape == (2, 1)
        return
    for _ in range(2):
        with pytest.raises(ShapeMismatchError):
            handle.wait()
    np.testing.assert_array_equal(
        comm.all_gather_async(np.array([comm.rank])).wait(), np.arange(comm.size)
    )


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_the_first_calls_of_many_threads_share_one_progress_thread(comm):
    part = comm.split(0)
    start = threading.Barrier(4, timeout=30)
    handles = []

    def submit():
        start.wait()
        handles.append(part.all_reduce_async(np.ones(10)))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(handle.wait(30)[0] == comm.size for handle in handles)
    part.close()


@pytest.mark.mpi
def test_nothing_of_an_ended_call_is_kept(comm):
    array = value(comm.rank, 1000)
    kept = weakref.ref(array)
    handle = comm.all_reduce_async(array)
    handle.wait()
    comm.barrier()
    del array, handle
    # The thread lets go of the job just after it has given the result.
    limit = time.monotonic() + 30
    while kept() is not None and time.monotonic() < limit:
        gc.collect()
    assert kept() is None


PROGRAMS = {
    "dropped": "comm.all_reduce_async(numpy.ones(1000))",
    "dropped after others": "comm.all_reduce_async(numpy.ones(9)).wait()\n"
    "for _ in range(20): comm.all_reduce_async(numpy.ones(100_000))",
    "closed while pending": "handle = comm.all_reduce_async(numpy.ones(1000))\n"
    "comm.close()\ncomm.close()\nassert handle.wait()[0] == comm.size",
    "submitted after close": "comm.close()\n"
    "try: comm.all_reduce_async(numpy.ones(2))\n"
    "except RuntimeError: pass\n"
    "else: raise SystemExit(3)",
}


@pytest.mark.parametrize("program", slow_but(PROGRAMS, "closed while pending"))
def test_handles_do_not_break_exit(program, launch):
    text = f"import collectives, numpy\ncomm = collectives.world()\n{PROGRAMS[program]}\n"
    ended = launch(2, [sys.executable, "-c", text + "print('ended well')"], timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ended well") == 2
    assert "MPI" not in ended.stderr


FIRST_CALLS = """
import numpy as np
import collectives
comm = collectives.world(deadline=20)
from mpi4py import MPI
rank, size = comm.rank, comm.size
parts = [comm.split(0) for _ in range(8)] + [comm.split(rank % 2)]
nodes = [other % 2 for other in range(size)]
parts += [collectives.Communicator(MPI.COMM_WORLD, deadline=20, node_of=nodes) for _ in range(2)]
order = [(3 * rank + index) % len(parts) for index in range(len(parts))]
handles = {index: parts[index].all_reduce_async(np.ones(1000)) for index in order}
# The thread that submits is inside MPI as well.
comm.split(0).close()
for index in reversed(order):
    assert (handles[index].wait() == parts[index].size).all()
print("ended well")
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, *slow(2, 5)])
def test_first_calls_of_several_communicators_in_another_order_on_every_rank(size, launch):
    ended = launch(size, [sys.executable, "-c", FIRST_CALLS], timeout=60)
    assert (ended.returncode, errors_of(ended)) == (0, "")
    assert ended.stdout.count("ended well") == size


def test_first_calls_of_several_communicators_in_an_mpi_that_the_program_started(launch):
    """A library may have been loaded that isn't thread-safe, and may write to stderr."""
    text = "from mpi4py import MPI\n" + FIRST_CALLS
    ended = launch(3, [sys.executable, "-c", text], timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ended well") == 3


def test_a_program_alone_needs_no_mpirun():
    text = (
        "import collectives, numpy\n"
        "comm = collectives.world()\n"
        "print(comm.all_reduce_async(numpy.arange(3)).wait().tolist())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "[0, 1, 2]\n"
