"""Faults on device arrays: no rank hangs, and every rank gets the error."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from collectives import CollectiveError, Communicator, DeadlineExceededError
from collectives.gpu import stream_work
from collectives.transports import local
from collectives.transports.base import abandoned
from collectives.transports.nccl_driver import NcclError
from tests.devices.gpu_worlds import run, simulated


def communicator(gpus, transport, deadline=20):
    """Of this thread's rank; its start may take longer than the deadline of its calls."""
    gpus.be_rank(transport.rank)
    comm = Communicator(transport, backend="nccl", deadline=20)
    comm.deadline = deadline
    return comm


def filled(cuda, value, count=4):
    return cuda.from_host(np.full(count, value, np.float32))


def test_a_rank_that_never_begins_on_the_gpu_is_named_by_wait():
    """Rank 1's stream is stuck in work of its own; rank 0 waits for the sum."""
    with simulated() as (gpus, nccl):

        def one_rank(transport):
            comm = communicator(gpus, transport, deadline=1)
            array = filled(gpus, comm.rank)
            if comm.rank == 1:
                gpus.slow(gpus.current_stream(), 30)
            handle, other = comm.all_reduce_async(array), comm.all_reduce_async(filled(gpus, 1))
            start = time.monotonic()
            with pytest.raises(DeadlineExceededError, match=r"all_reduce.*1 s"):
                handle.wait()
            with pytest.raises(RuntimeError, match="can't go on"):
                comm.all_reduce(array)
            # The abort has ended its kernel, too, without a result.
            with pytest.raises(CollectiveError, match="an error of another call has ended it"):
                other.wait()
            return time.monotonic() - start

        seconds = local.run(2, one_rank)
        assert max(seconds) < 15
        assert [comm.ended for comm in nccl.comms] == ["aborted", "aborted"]


def test_an_abort_ends_the_waits_of_other_threads():
    with simulated() as (gpus, _):

        def one_rank(transport):
            comm = communicator(gpus, transport)
            if comm.rank == 1:
                gpus.slow(gpus.current_stream(), 3)
            handle = comm.all_reduce_async(filled(gpus, comm.rank))

            def wait():
                gpus.be_rank(transport.rank)
                with pytest.raises(CollectiveError, match="an error of another call has ended it"):
                    handle.wait()

            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(wait)
                end = time.monotonic() + 10
                while not comm._devices._path._launches._waiting:
                    assert time.monotonic() < end
                    time.sleep(0.01)
                comm._devices.give_up(RuntimeError("the test ends it"))
                waiting.result(timeout=10)

        local.run(2, one_rank)


def test_what_nccl_reports_is_raised_by_wait_and_ends_the_communicator():
    with simulated() as (gpus, nccl):

        def one_rank(transport):
            comm = communicator(gpus, transport, deadline=10)
            gpus.slow(gpus.current_stream(), 5)
            handle = comm.all_reduce_async(filled(gpus, 1))
            nccl.comms[comm.rank].error = NcclError(6, "remote error")
            with pytest.raises(CollectiveError, match=r"all_reduce.*remote error"):
                handle.wait()
            with pytest.raises(RuntimeError, match="can't go on"):
                comm.barrier()

        local.run(2, one_rank)
        assert [comm.ended for comm in nccl.comms] == ["aborted", "aborted"]


@pytest.mark.parametrize("name", ["all_reduce", "group_end", "send"])
def test_a_call_that_fails_ends_the_communicator(name):
    """The others may be in it: it can't be repeated."""

    def call(comm, array):
        if name == "all_reduce":
            return comm.all_reduce_async(array)
        return comm.all_gather_async(array[: comm.rank + 1])

    with simulated() as (gpus, nccl):

        def one_rank(transport):
            comm = communicator(gpus, transport, deadline=10)
            array = filled(gpus, comm.rank)
            call(comm, array).wait()
            comm.deadline = 1.5
            if comm.rank == 0:
                nccl.fail_next(0, name, 1)
            problem = "failure" if comm.rank == 0 else "waited the deadline"
            launches = comm._devices._path._launches
            with pytest.raises(CollectiveError, match=problem):
                call(comm, array).wait()
            assert not launches._launched, "an abandoned path holds arrays"
            with pytest.raises(RuntimeError, match="can't go on"):
                comm.all_reduce(array)
            comm.close_at_exit(0.1)

        local.run(2, one_rank)
        assert [comm.ended for comm in nccl.comms] == ["aborted", "aborted"]


def test_what_one_rank_alone_can_not_do_is_no_call_of_its_next_one(monkeypatch):
    """The others are in the call: their results would be those of different calls."""
    with simulated() as (gpus, nccl):

        def one_rank(transport):
            comm = communicator(gpus, transport, deadline=10)
            array = filled(gpus, comm.rank)
            comm.all_reduce(array)
            comm.deadline = 1.5
            if comm.rank == 1:
                monkeypatch.setattr(comm._devices._path, "run", fail)
                with pytest.raises(OSError, match="no kernel"):
                    comm.broadcast(array)
            else:
                with pytest.raises(DeadlineExceededError):
                    comm.broadcast_async(array).wait()
            with pytest.raises(RuntimeError, match="can't go on"):
                comm.all_reduce(array)

        def fail(request):
            raise OSError("no kernel")

        local.run(2, one_rank)
        assert [comm.ended for comm in nccl.comms] == ["aborted", "aborted"]


def test_a_communicator_that_a_graph_uses_is_not_destroyed():
    """NCCL would wait for the graph, which may outlive the communicator."""

    def program(comm, cuda):
        stream = cuda.new_stream()
        with cuda.on(stream):
            array = filled(cuda, comm.rank)
            comm.all_reduce(array, out=array)
            stream.begin_capture()
            comm.all_reduce(array, out=array)
            stream.end_capture()

    with simulated() as (gpus, nccl):
        run(2, program, gpus=gpus, backend="nccl")
        assert not any(comm.ended for comm in nccl.comms)
        assert len(nccl.comms) == 2


def test_a_call_that_nobody_waits_for_ends_the_job_at_the_deadline(monkeypatch):
    monkeypatch.setattr(stream_work, "GRACE_SECONDS", 0.2)
    ended = []
    with simulated() as (gpus, _):

        def one_rank(transport):
            comm = communicator(gpus, transport, deadline=0.4)
            path = comm._devices._path
            path._launches._end_job = ended.append
            if comm.rank == 1:
                gpus.slow(gpus.current_stream(), 30)
            comm.all_reduce(filled(gpus, comm.rank))
            end = time.monotonic() + 8
            while not ended and time.monotonic() < end:
                time.sleep(0.05)
            comm._devices.give_up(RuntimeError("the test is over"))

        local.run(2, one_rank)
    assert ended
    assert "all_reduce" in ended[0]
    assert "has run on the GPU for the deadline of 0.4 s" in ended[0]


def test_work_of_the_caller_does_not_count_for_the_deadline(monkeypatch):
    monkeypatch.setattr(stream_work, "GRACE_SECONDS", 0.2)
    ended = []

    def program(comm, cuda):
        comm.deadline = 0.6
        comm._devices._path._launches._end_job = ended.append
        cuda.slow(cuda.current_stream(), 1.5)
        result = comm.all_reduce(filled(cuda, comm.rank))
        time.sleep(1.3)
        return result.get().tolist()

    assert run(2, program, backend="nccl") == [[1.0] * 4] * 2
    assert not ended


def test_a_mismatch_leaves_the_communicator_as_it_was():
    def program(comm, cuda):
        array = filled(cuda, comm.rank, 4 + comm.rank)
        with pytest.raises(CollectiveError, match="different shapes"):
            comm.all_reduce(array)
        return comm.all_reduce(array[:4]).get().tolist()

    assert run(2, program, backend="nccl") == [[1.0] * 4] * 2


def test_closing_waits_for_what_runs_and_destroys_in_step():
    with simulated() as (gpus, nccl):

        def program(comm, cuda):
            cuda.slow(cuda.current_stream(), 0.3)
            comm.all_reduce(filled(cuda, comm.rank))

        run(3, program, gpus=gpus, backend="nccl")
        assert [comm.ended for comm in nccl.comms] == ["destroyed"] * 3


def test_closing_aborts_what_never_ends():
    with simulated() as (gpus, nccl):

        def one_rank(transport):
            comm = communicator(gpus, transport, deadline=0.4)
            launches = comm._devices._path._launches
            if comm.rank == 1:
                gpus.slow(gpus.current_stream(), 9)
            comm.all_reduce(filled(gpus, comm.rank))
            with pytest.raises(DeadlineExceededError, match="all_reduce"):
                comm.close()
            assert not launches._launched, "an aborted path holds arrays, which the watchdog sees"

        local.run(2, one_rank)
        assert [comm.ended for comm in nccl.comms] == ["aborted", "aborted"]


def test_arrays_are_kept_where_nccl_is_not_aborted():
    """A graph uses the communicator: its kernels may write on."""
    with simulated() as (gpus, nccl):

        def one_rank(transport):
            comm = communicator(gpus, transport)
            launches = comm._devices._path._launches
            stream = gpus.new_stream()
            with gpus.on(stream):
                array = filled(gpus, comm.rank)
                comm.all_reduce(array, out=array)
                stream.begin_capture()
                comm.all_reduce(array, out=array)
                stream.end_capture()
                comm.all_reduce(array)
                comm._devices.give_up(RuntimeError("the test ends it"))
            assert launches._launched
            assert launches in abandoned
            abandoned.remove(launches)

        local.run(2, one_rank)
        assert not any(comm.ended for comm in nccl.comms)


def test_a_rank_that_ends_with_an_exception_aborts():
    with simulated() as (gpus, nccl):

        def program(comm, cuda):
            comm.all_reduce(filled(cuda, comm.rank))
            if comm.rank == 1:
                raise ZeroDivisionError

        def one_rank(transport):
            comm = communicator(gpus, transport, deadline=0.4)
            try:
                program(comm, gpus)
                comm.close()
            except BaseException:
                comm._devices.give_up(RuntimeError("this rank ends"))
                comm.close_at_exit(0.1)
                raise

        with pytest.raises(ZeroDivisionError):
            local.run(2, one_rank)
        assert [comm.ended for comm in nccl.comms] == ["aborted", "aborted"]


def test_a_program_without_cupy_is_told_what_to_install():
    program = (
        "import sys; sys.modules['cupy'] = None\n"
        "class OnGpu:\n"
        "    __cuda_array_interface__ = {}\n"
        "import collectives\n"
        "try:\n"
        "    collectives.world().all_reduce(OnGpu())\n"
        "except collectives.BackendUnavailableError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "arrays on a GPU need CuPy: `pip install 'mpi-collectives[cuda12]'`" in done.stdout
