"""Asynchronous calls."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import numpy as np
import pytest

from collectives import (
    CollectiveMismatchError,
    Communicator,
    DtypeMismatchError,
    MismatchError,
    OpMismatchError,
    RootMismatchError,
    ShapeMismatchError,
)
from collectives.errors import UnusableError
from collectives.lifecycle import nodes
from collectives.lifecycle.futures import Handle
from collectives.transports.local import run
from tests.collectives.oracle import case, reduced, value, values
from tests.slow import slow, slow_but
from tests.worlds.launcher import find_mpirun, is_open_mpi
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


def test_calls_whose_thread_cannot_begin(monkeypatch):
    def fails(engine):
        raise OSError("no channel")

    def body(threads):
        comm = Communicator(threads)
        comm.barrier()
        monkeypatch.setattr(nodes, "agree_by_messages", fails)
        handle = comm.all_reduce_async(np.ones(3))
        with pytest.raises(UnusableError, match=r"OSError\('no channel'\) ended"):
            handle.wait(20)

    run(2, body)


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


def calls_of_every_form(comm):
    """By name: the arguments of the blocking and the asynchronous form, made anew for each."""
    rank, size, root = comm.rank, comm.size, comm.size - 1
    long, blocks = 40_000, [value(rank + peer, (peer + 1, 2)) for peer in range(size)]
    calls = {}
    for dtype in ("int32", "float16", "float64"):
        own = value(rank, (5, 4), dtype)
        calls |= {
            f"all_reduce {dtype}": ((own, "mean"), {"what": "step 3"}),
            f"reduce {dtype}": ((own, "max"), {"root": root}),
            f"reduce_scatter {dtype}": ((own, "product"), {"axis": 1}),
            f"broadcast {dtype}": ((own.copy(),), {"root": root}),
            f"gather {dtype}": ((own[: rank + 1],), {"root": root}),
            f"all_reduce_many {dtype}": (([own, own[0], value(rank, long)], "mean"), {}),
        }
    return calls | {
        "all_reduce forced": ((value(rank, long),), {"algorithm": "doubling"}),
        "reduce_scatter into out": (
            (value(rank, size * 9),),
            {"out": np.zeros(9), "algorithm": "ring"},
        ),
        "all_gather into out": (
            (value(rank, (2, 3)),),
            {"axis": 1, "out": np.zeros((2, 3 * size))},
        ),
        "scatter": ((value(rank, (3, 7)) if rank == root else None,), {"root": root, "axis": 1}),
        "scan": ((value(rank, long), "max"), {}),
        "exscan": ((value(rank, (4, 2)),), {"out": np.zeros((2, 4)).T}),
        "all_to_all": ((blocks,), {}),
        "barrier": (("the same",), {}),
        "all_reduce_many cut": (
            ([value(rank, 3), value(rank, long)],),
            {"bucket_bytes": 1000},
        ),
    }


@pytest.mark.mpi
def test_every_form_has_the_bits_of_the_blocking_call(comm):
    """All of them in flight at once, beside the blocking ones."""
    handles = {
        name: getattr(comm, f"{name.split()[0]}_async")(*given, **named)
        for name, (given, named) in calls_of_every_form(comm).items()
    }
    for name, (given, named) in calls_of_every_form(comm).items():
        with case(name):
            expected = getattr(comm, name.split()[0])(*given, **named)
            result = handles[name].wait()
            assert type(result) is type(expected)
            pairs = zip(result, expected, strict=True) if isinstance(result, list) else ()
            for one, other in pairs if isinstance(result, list) else [(result, expected)]:
                assert np.array_equal(one, other)
                assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
    asynchronous = {each.removesuffix("_async") for each in dir(comm) if each.endswith("_async")}
    assert asynchronous == {name.split()[0] for name in handles}


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_arguments_of_one_rank_are_refused_at_once_and_differences_by_wait(comm):
    other, size = comm.rank == 0, comm.size
    array = np.ones(size)
    for error, start in (
        (RootMismatchError, lambda: comm.reduce_async(array, root=int(other))),
        (OpMismatchError, lambda: comm.reduce_scatter_async(array, "max" if other else "sum")),
        (DtypeMismatchError, lambda: comm.gather_async(array.astype("f4") if other else array)),
        (RootMismatchError, lambda: comm.scatter_async(array, root=int(other))),
        (CollectiveMismatchError, lambda: (comm.barrier_async if other else comm.all_to_all_async)(
            *([] if other else [[array] * size])
        )),
        (ShapeMismatchError, lambda: comm.all_reduce_many_async([array, array[int(other) :]])),
        (MismatchError, lambda: comm.barrier_async("this" if other else "that")),
    ):  # fmt: skip
        with case(error.__name__):
            handle = start()
            texts = []
            for _ in range(2):
                with pytest.raises(error) as caught:
                    handle.wait()
                texts.append(str(caught.value))
            assert len(set(comm.all_gather_object(texts[0]) + texts)) == 1
            np.testing.assert_array_equal(comm.all_reduce_async(array).wait(), array * size)
    refused = {
        "root=9": lambda: comm.reduce_async(array, root=9),
        "axis=4": lambda: comm.reduce_scatter_async(array, axis=4),
        "algorithm='none'": lambda: comm.gather_async(array, algorithm="none"),
        "arrays has 1 entries": lambda: comm.all_to_all_async([array]),
        "bucket_bytes=0": lambda: comm.all_reduce_many_async([array], bucket_bytes=0),
        "out has shape": lambda: comm.all_reduce_async(array, out=np.ones((3, 2, 1))),
    }
    for text, start in refused.items():
        with pytest.raises(ValueError, match=text):
            start()
    received = comm.irecv(np.empty(size), (comm.rank - 1) % size)
    for handle in (comm.all_reduce_async(array), comm.isend(array, (comm.rank + 1) % size)):
        with pytest.raises(TypeError, match="timeout='1': must be a number of seconds, or None"):
            handle.wait("1")
        handle.wait(np.float32(60))
    received.wait(60)
    with pytest.raises(TypeError, match="path=None: must be a str"):
        comm.trace(None)
    np.testing.assert_array_equal(comm.all_reduce_async(array).wait(), array * size)
    # Of the root's array alone; the other ranks learn of it.
    with pytest.raises(TypeError, match="array of dtype object"):
        comm.scatter_async(np.array([None]) if comm.rank == 1 else None, root=1).wait()
    np.testing.assert_array_equal(comm.all_reduce_async(array).wait(), array * size)


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


def test_a_call_that_ends_just_after_the_time_of_a_wait():
    class Late(Future):
        def result(self, timeout=None):
            self.set_result(None)
            raise FutureTimeoutError

    with pytest.raises(TimeoutError, match=r"not done after 1\.0 s"):
        Handle(Late()).wait(1)


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


# The program, and on how many of its two ranks an error is logged.
FAILED = {
    "dropped": ("comm.all_reduce_async(array)", 2),
    "kept": ("handle = comm.all_reduce_async(array)", 2),
    "kept, closed": ("handle = comm.all_reduce_async(array); comm.close()", 2),
    "closed, waited for": (
        "handle = comm.all_reduce_async(array); comm.close(); fails(handle)",
        0,
    ),
    "several": ("handles = [comm.all_reduce_async(array) for _ in range(3)]; fails(handles[1])", 0),
    "one after another was waited for": (
        "fails(comm.all_reduce_async(array)); comm.all_reduce_async(array)",
        2,
    ),
    "in a forked child": (
        "handle = comm.all_reduce_async(array)\n"
        "while not handle.done(): pass\n"
        "if child := os.fork(): os.waitpid(child, 0)\n"
        "else: handle = None; sys.exit()\n"
        "fails(handle)",
        0,
    ),
    "without threads": ("handle = comm.all_reduce_async(array)", 2),
}


@pytest.mark.parametrize(
    "program", slow_but(FAILED, "in a forked child", "kept", "closed, waited for")
)
def test_an_error_that_nothing_has_waited_for_is_logged(program, launch):
    lines, ranks = FAILED[program]
    head = """
import collectives, mpi4py, numpy, os, sys
mpi4py.rc.thread_level = "{}"
comm = collectives.world()
array = numpy.ones(3 + comm.rank)
def fails(handle):
    try: handle.wait()
    except collectives.ShapeMismatchError: return
    raise AssertionError
"""
    level = "serialized" if program == "without threads" else "multiple"
    ended = launch(2, [sys.executable, "-c", head.format(level) + lines], timeout=60)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    text = "nothing has waited for it: ShapeMismatchError: the ranks called"
    assert ended.stderr.count(text) == ranks, ended.stderr


@pytest.mark.parametrize("handler", ["", "logging.getLogger('collectives').addHandler(Fails())"])
def test_an_uncaught_exception_ends_the_job_after_the_log(launch, handler):
    """Also where a program's log handler fails."""
    text = f"""
import collectives, logging, numpy
class Fails(logging.Handler):
    def emit(self, record): raise OSError("no log")
{handler}
comm = collectives.world()
handle = comm.all_reduce_async(numpy.ones(3 + comm.rank))
while not handle.done(): pass
comm.barrier()
raise ValueError("later")
"""
    ended = launch(2, [sys.executable, "-c", text], timeout=60)
    assert ended.returncode != 0
    waited = "nothing has waited for it: ShapeMismatchError: the ranks called"
    if handler:
        waited = "OSError: no log"
    assert 0 <= ended.stderr.find(waited) < ended.stderr.find("ValueError: later"), ended.stderr


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
    warned = "go by messages" in ended.stderr
    assert warned == (is_open_mpi(find_mpirun()) and "OMPI_MCA_osc" not in os.environ)


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_sleeps_of_the_threads_of_asynchronous_calls_end_in_time():
    def slack(transport):
        with Communicator(transport) as comm:
            comm.all_reduce_async(np.ones(3)).wait()
            thread = comm._duplicate.progress._thread
            return Path(f"/proc/{thread.native_id}/timerslack_ns").read_text()

    assert run(2, slack) == ["1000\n"] * 2


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
