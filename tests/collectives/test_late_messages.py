"""Messages between two ranks, one of which is late: each arrives once, and in order."""

import gc
import random
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator
from collectives.consistency.flight_recorder import DIRECTORY_VARIABLE
from collectives.transports import local
from collectives.transports.mpi import MpiTransport
from collectives.transports.mpi_messages import FIRST_TAG
from tests.collectives.waiting import wait_for_all

PATIENT = 30
SMALL, LARGE = 3, 1_000_000


@pytest.fixture
def late(comm, tmp_path, monkeypatch):
    """A communicator to change the deadline of."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    with Communicator(MPI.COMM_WORLD, deadline=PATIENT) as other:
        yield other
        other.deadline = PATIENT


def until(ready):
    limit = time.monotonic() + PATIENT
    while not ready():
        assert time.monotonic() < limit


def arriving(handle):
    return handle.done() or handle._transfer.arrived


def received(comm, length, tag=0):
    return comm.recv(np.zeros(length), 0, tag)[[0, -1]].tolist()


def give_up_to_receive(comm, length, tag=0):
    comm.deadline = 0.1
    out = np.zeros(length)
    with pytest.raises(collectives.DeadlineExceededError) as caught:
        comm.recv(out, 0, tag)
    assert caught.value.absent == (0,)
    comm.deadline = PATIENT
    return out


def until_it_is_done(call):
    end = time.monotonic() + PATIENT
    while time.monotonic() < end:
        try:
            return call()
        except collectives.DeadlineExceededError:
            continue
    raise AssertionError("it was never done")


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_a_message_that_comes_after_the_end_of_its_transport(tmp_path, monkeypatch):
    """As where the constructor of a communicator exceeds the deadline."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    buffer, rank, mpi = np.zeros(600, np.uint8), transport.rank, transport.comm
    transport.wait_policy.deadline, kept = 0.1, weakref.ref(buffer)
    with pytest.raises(collectives.DeadlineExceededError):
        transport.exchange([], [(rank, buffer.data)])
    del buffer, transport
    gc.collect()
    assert kept() is not None
    mpi.Send(np.full(600, rank + 1, np.uint8), rank, 0)
    until(lambda: mpi.Iprobe() or kept().all())
    assert (kept() == rank + 1).all()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_message_that_comes_after_the_close_of_a_broken_communicator(comm):
    other = Communicator(MPI.COMM_WORLD, deadline=PATIENT)
    buffer, peer, mpi = np.zeros(600, np.uint8), 1 - comm.rank, other._engine.transport.comm
    head = mpi.Isend(np.array([len(buffer), 0], np.int64), peer, FIRST_TAG)
    handle, kept = other.irecv(buffer, peer), weakref.ref(buffer)
    until(partial(arriving, handle))
    other._engine.break_off(ValueError("broken"))
    other.close()
    comm.barrier()
    del buffer, handle, other
    gc.collect()
    body = mpi.Isend(np.full(600, peer + 1, np.uint8), peer, FIRST_TAG)
    until(lambda: mpi.Iprobe() or kept().all())
    assert (kept() == comm.rank + 1).all()
    MPI.Request.Waitall([head, body])


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_a_receive_that_was_given_up_takes_no_message(late, length):
    if late.rank == 1:
        given_up = [give_up_to_receive(late, length) for _ in range(2)]
    wait_for_all()
    if late.rank == 0:
        for value, tag in ((1, 0), (2, 0), (3, 5), (4, 0)):
            late.send(np.full(length, value + 0.5), 1, tag)
    if late.rank == 1:
        if length == SMALL:
            # Large ones wait for their receiver, one after the other.
            assert received(late, length, tag=5) == [3.5] * 2
        assert received(late, length) == [1.5] * 2
        # Another length than that of the withdrawn one.
        with pytest.raises(collectives.ShapeMismatchError):
            late.recv(np.zeros(1), 0)
        if length == LARGE:
            assert received(late, length, tag=5) == [3.5] * 2
        assert received(late, length) == [4.5] * 2
        assert not any(map(np.any, given_up))
    assert late.all_gather_object(late.rank) == list(range(late.size))


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_messages_that_come_when_the_receive_is_given_up(late, length):
    chance, deadline = random.Random(3), 0.02
    for number in range(15):
        offset = chance.uniform(-0.003, 0.003)
        wait_for_all()
        late.deadline = deadline
        if late.rank == 0:
            time.sleep(deadline + offset)
            array = np.full(length, number + 1.0)
            until_it_is_done(lambda array=array: late.send(array, 1))
        else:
            out = np.zeros(length)
            assert until_it_is_done(lambda out=out: late.recv(out, 0)) is out
            assert (out == number + 1).all()
        late.deadline = PATIENT
    late.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_send_that_exceeded_its_deadline_is_not_sent_twice(late):
    array = np.full(LARGE, 1.0)
    if late.rank == 0:
        late.deadline = 0.1
        for _ in range(2):
            with pytest.raises(collectives.DeadlineExceededError) as caught:
                late.send(array, 1)
            assert caught.value.absent == (1,)
        late.deadline = PATIENT
        wait_for_all()
        late.send(array, 1)
        late.send(np.full(LARGE, 2.0), 1)
    else:
        wait_for_all()
    if late.rank == 1:
        assert received(late, LARGE) == [1.0] * 2
        assert received(late, LARGE) == [2.0] * 2
    late.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_close_waits_for_a_message_that_was_given_up_halfway(late):
    """MPI writes the rest of it into the array."""
    comm, body = late._engine.transport.comm, np.full(80, 7, np.uint8)
    if late.rank == 0:
        comm.Send(np.array([len(body), 0], np.int64), 1, FIRST_TAG)
        wait_for_all()
        comm.Send(body, 1, FIRST_TAG)
    else:
        out, late.deadline = np.zeros(80, np.uint8), 0.1
        with pytest.raises(collectives.DeadlineExceededError):
            late.recv(out, 0)
        with pytest.raises(collectives.DeadlineExceededError, match=r"recv\(from rank 0, tag=0\)"):
            late.close()
        late.deadline = PATIENT
        wait_for_all()
    late.close()
    assert late.rank == 0 or (out == 7).all()


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_an_error_of_mpi_names_the_rank():
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    comm, rank = transport.comm, transport.rank
    head = np.array([8, 0], np.int64)  # and more bytes than that follow
    sends = [comm.Isend(part, rank, FIRST_TAG) for part in (head, np.zeros(80, np.uint8))]
    with pytest.raises(collectives.RankFailedError, match=f"rank {rank}: MPI could not transfer"):
        until(lambda: (got := transport.receive(memoryview(bytearray(8)), rank, 0)) and got.done())
    MPI.Request.Waitall(sends)
    transport.close()


def test_threads_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    together = threading.Barrier(2, timeout=PATIENT)

    def program(transport):
        comm = Communicator(transport, deadline=PATIENT)
        if comm.rank == 1:
            give_up_to_receive(comm, SMALL)
        together.wait()
        if comm.rank == 0:
            return [comm.send(np.full(SMALL, value), 1) for value in (1.5, 2.5)]
        return [received(comm, SMALL)[0] for _ in range(2)]

    assert local.run(2, program)[1] == [1.5, 2.5]


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_wait_for_data_sleeps_less_than_other_waits(comm, monkeypatch):
    """MPI moves data only when it is called, so that the link may be idle meanwhile."""
    slept, sleep, world, own = [], time.sleep, MPI.COMM_WORLD, threading.get_ident()

    def recorded(seconds):
        if threading.get_ident() == own:
            slept.append(seconds)
            if comm.rank == 0 and len(slept) == 30:
                world.send(None, 1)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", recorded)
    transport = MpiTransport(world.Dup())
    content, peer = [memoryview(bytearray(8)) for _ in range(2)], 1 - comm.rank
    if comm.rank == 1:
        end = time.monotonic() + 0.2
        transport.wait_policy.until(lambda: time.monotonic() >= end, dict)
        assert max(slept) > 0.5e-3
        world.recv(source=0)
    transport.exchange([(peer, content[0])], [(peer, content[1])])
    transport.close()
    if comm.rank == 0:
        assert max(slept) <= 0.1e-3


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_an_exchange_announces_its_messages_before_it_clears_those_of_others(comm, monkeypatch):
    """Else a rank that comes first sends all of its message before it clears the other's."""
    posted = []

    class Recorded:
        def __getattr__(self, name):
            posted.append(name)
            return getattr(MPI.COMM_WORLD, name)

    monkeypatch.setattr(MpiTransport, "comm", Recorded())
    transport = MpiTransport(MPI.COMM_WORLD)
    content, peer = [memoryview(bytearray([comm.rank] * 8)) for _ in range(2)], 1 - comm.rank
    transport.exchange([(peer, content[0])], [(peer, content[1])])
    assert posted == ["Isend", "Irecv"]
    assert bytes(content[1]) == bytes([peer] * 8)
