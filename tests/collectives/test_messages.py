"""Messages between two ranks that are started, and waited for later."""

import gc
import random
import re
import sys
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI

from collectives import (
    Communicator,
    DeadlineExceededError,
    DtypeMismatchError,
    Handle,
    ShapeMismatchError,
)
from collectives.asynchronous.messages import MessageHandle
from collectives.calls.point_to_point import Incoming
from collectives.consistency.flight_recorder import DIRECTORY_VARIABLE
from collectives.transports import local
from tests.collectives.oracle import case, value
from tests.collectives.waiting import wait_for_all
from tests.worlds.programs import errors_of

PATIENT = 30
LARGE = 300_000
LENGTHS = (0, 1, 7, 5000, LARGE)


@pytest.fixture
def own(comm, tmp_path, monkeypatch):
    """A communicator to change the deadline of, or to close."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    other = Communicator(MPI.COMM_WORLD, deadline=PATIENT)
    yield other
    other.deadline = PATIENT
    other.close()


def others(comm):
    return [peer for peer in range(comm.size) if peer != comm.rank]


def message(source, dest, tag, number):
    """What the rank sends: other values, and another length, than any other message."""
    length = LENGTHS[(number + tag + dest) % len(LENGTHS)]
    return value(source + 5 * dest + 3 * tag + 7 * number, length + source, np.int64, 1000)


def cross(comm, seed):
    """Messages between all pairs of ranks, started and waited for in another order on each."""
    rng = random.Random(seed + comm.rank)
    pairs = [(peer, tag) for peer in others(comm) for tag in (0, 1, 32_000)]
    starts = [("send", *pair) for pair in pairs] * 5 + [("receive", *pair) for pair in pairs] * 5
    rng.shuffle(starts)
    counts, handles = {}, []
    for kind, peer, tag in starts:
        number = counts[kind, peer, tag] = counts.get((kind, peer, tag), -1) + 1
        if kind == "send":
            handle = comm.isend(message(comm.rank, peer, tag, number), peer, tag)
            handles.append((handle, None, None))
        else:
            expected = message(peer, comm.rank, tag, number)
            array = np.zeros(2 * len(expected), np.int64)[::2]
            handles.append((comm.irecv(array, peer, tag), array, expected))
    rng.shuffle(handles)
    for handle, array, expected in handles:
        assert isinstance(handle, Handle)
        assert handle.wait() is array
        assert handle.done()
        if array is not None:
            np.testing.assert_array_equal(array, expected)
    return len(handles)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
def test_many_that_cross(comm):
    for seed in range(3):
        assert cross(comm, seed) == 30 * (comm.size - 1)
        comm.barrier()


def test_many_that_cross_between_threads():
    counts = local.run(3, lambda transport: cross(Communicator(transport, deadline=PATIENT), 1))
    assert counts == [60] * 3


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_of_one_tag_none_overtakes_another(comm):
    """With blocking calls in between, received in order and waited for in reverse order."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrays = [np.full(LARGE if number % 3 else 2, comm.rank + 10.0 * number) for number in range(8)]
    outs = [np.empty_like(array) for array in arrays]
    received = [comm.irecv(out, previous, 4) for out in outs[:-1]]
    sent = [comm.isend(array, following, 4) for array in arrays[:4]]
    for array in arrays[4:-1]:
        comm.send(array, following, 4)
    sent.append(comm.isend(arrays[-1], following, 4))
    comm.recv(outs[-1], previous, 4)
    for handle in [*reversed(received), *sent]:
        handle.wait(PATIENT)
    for number, out in enumerate(outs):
        assert (out == previous + 10 * number).all(), number


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_it_arrives_while_the_receiver_does_something_else(comm):
    """A large message needs its receiver's help, which waits in a collective until then."""
    array = np.zeros(LARGE)
    if comm.rank == 0:
        handles = [comm.irecv(array, 1)]
    elif comm.rank == 1:
        comm.isend(np.full(LARGE, 1.5), 0).wait(PATIENT)
    comm.barrier()
    if comm.rank == 0:
        assert handles[0].wait() is array
        assert (array == 1.5).all()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_deadline_names_the_peer_and_the_message_remains(own):
    wait_for_all()
    if own.rank < 2:
        peer, array = 1 - own.rank, np.zeros(LARGE)
        received, number = own.irecv(array, peer, 3), own.rank + 1.0
        assert not received.done()
        with pytest.raises(TimeoutError, match=r"not done after 0.01 s"):
            received.wait(0.01)
        own.deadline = 0.1
        with pytest.raises(DeadlineExceededError) as caught:
            received.wait()
        assert caught.value.absent == (peer,)
        text = rf"irecv\(from rank {peer}, tag=3\), waited the deadline of 0.1 s for rank {peer}"
        # Rank 0 may have sent its other message by now.
        other = r"(, which has sent a message with tag=9)?"
        assert re.match(rf"{text}{other} \({re.escape(__file__)}", str(caught.value))
        if own.rank == 0:
            # The other rank receives nothing of this tag for now.
            sent = own.isend(np.full(LARGE, 7.5), 1, tag=9)
            with pytest.raises(DeadlineExceededError, match=r"isend\(to rank 1, tag=9\)") as caught:
                sent.wait()
            assert caught.value.absent == (1,)
        own.deadline = PATIENT
    wait_for_all()
    if own.rank < 2:
        # Also beside a blocking receive, whose deadline leaves the message to the next one.
        own.deadline = 0.1
        with pytest.raises(DeadlineExceededError):
            own.recv(np.zeros(2), peer, 5)
        own.deadline = PATIENT
        wait_between_two(own)
        late = own.irecv(np.zeros(2), peer, 5)
        own.send(np.full(2, number + 10), peer, 5)
        assert (late.wait() == (peer + 1) + 10).all()
        if own.rank == 1:
            assert (own.recv(np.zeros(LARGE), 0, tag=9) == 7.5).all()
        handle = own.isend(np.full(LARGE, number), peer, 3)
        assert (received.wait() == peer + 1).all()
        handle.wait()
        if own.rank == 0:
            sent.wait()


def wait_between_two(comm):
    """Both have given up before either sends."""
    comm.isend(np.ones(1), 1 - comm.rank, 77).wait()
    comm.recv(np.ones(1), 1 - comm.rank, 77)


def until_done(handle):
    limit = time.monotonic() + PATIENT
    while not handle.done():
        assert time.monotonic() < limit


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_the_array_holds_the_message_once_the_handle_is_done(comm):
    array = np.zeros((3, 2))
    handle = comm.irecv(column := array[:, 1], 1 - comm.rank, 6)
    comm.send(np.arange(3.0) + comm.rank, 1 - comm.rank, 6)
    until_done(handle)
    assert array.tolist() == [[0.0, each + 1 - comm.rank] for each in range(3)]
    assert handle.wait() is column
    comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_messages_unlike_the_array(comm):
    cases = {
        "shorter": (
            np.zeros(4),
            np.ones(3),
            ShapeMismatchError,
            "3 elements of float64, the receiving array 4",
        ),
        "longer": (np.zeros(2), np.ones(LARGE), ShapeMismatchError, "the receiving array 2"),
        "another dtype": (np.zeros(4, "f4"), np.ones(4, "i4"), DtypeMismatchError, "float32"),
    }
    for name, (out, sent, error, text) in cases.items():
        with case(name):
            if comm.rank == 0:
                comm.isend(sent, 1, 2).wait()
                continue
            handle = comm.irecv(out, 0, 2)
            until_done(handle)
            for _ in range(2):
                with pytest.raises(error, match=text):
                    handle.wait()
            assert handle.done()
    if comm.rank == 0:
        comm.isend(np.arange(6.0).reshape(2, 3).T, 1).wait()
    else:
        # The elements in C order, whatever the shape.
        assert comm.irecv(np.zeros((2, 3)), 0).wait().tolist() == [[0, 3, 1], [4, 2, 5]]
    comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_wrong_arguments(comm):
    for text, call in (
        ("dest=9", lambda: comm.isend(np.ones(1), 9)),
        (f"source={comm.rank}: must be another", lambda: comm.irecv(np.ones(1), comm.rank)),
        ("tag=-1", lambda: comm.irecv(np.ones(1), others(comm)[0], -1)),
        ("read-only", lambda: comm.irecv(np.broadcast_to(1.0, 3), others(comm)[0])),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_nothing_of_an_ended_message_is_kept(comm):
    array = np.full(LARGE, comm.rank + 1.0)
    kept = weakref.ref(array)
    handles = [comm.irecv(np.zeros(LARGE), 1 - comm.rank), comm.isend(array, 1 - comm.rank)]
    assert handles[0].wait()[0] == 2 - comm.rank
    handles[1].wait()
    del array, handles
    limit = time.monotonic() + PATIENT
    while kept() is not None and time.monotonic() < limit:
        gc.collect()
    assert kept() is None
    comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_close_waits_for_messages(own, tmp_path):
    array = np.zeros(LARGE)
    if own.rank == 0:
        own.isend(np.full(LARGE, 2.5), 1)
        handle = None
    else:
        handle = own.irecv(array, 0)
        never = own.irecv(np.zeros(1), 0, 1)
        own.deadline = 0.1
        with pytest.raises(DeadlineExceededError, match=r"irecv\(from rank 0, tag=1\)"):
            own.close()
        own.deadline = PATIENT
        assert not own.closed
        assert not never.done()
    wait_for_all()
    if own.rank == 0:
        own.send(np.ones(1), 1, 1)
    own.close()
    if handle is not None:
        assert handle.wait() is array
        assert (array == 2.5).all()
        assert never.wait()[0] == 1
    with pytest.raises(RuntimeError, match="closed"):
        own.isend(array, 1 - own.rank)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_wrong_timeout_ends_nothing(comm):
    handle = comm.irecv(np.zeros(1), 1 - comm.rank, 8)
    with pytest.raises(TypeError):
        handle.wait("1")
    comm.send(np.ones(1), 1 - comm.rank, 8)
    assert handle.wait()[0] == 1
    comm.barrier()


def test_a_handle_of_a_broken_communicator_is_done():
    comm = Communicator(local.alone())
    handle = MessageHandle(comm._messages, Incoming("irecv", np.zeros(1), 1, 0))
    assert not handle.done()
    comm._engine.break_off(ValueError("a handler's"))
    assert handle.done()
    with pytest.raises(RuntimeError, match="a handler's"):
        handle.wait()


def test_nothing_is_kept_without_a_thread():
    """As with an MPI library below MPI_THREAD_MULTIPLE."""

    def program(transport):
        transport.threads = False
        comm, kept = Communicator(transport, deadline=PATIENT), []
        for number in range(20):
            array = np.zeros(3)
            kept.append(weakref.ref(array))
            handle = comm.irecv(array, 1 - comm.rank)
            del array
            comm.send(np.full(3, float(number)), 1 - comm.rank)
            comm.barrier()
            assert handle.wait()[0] == number
        del handle
        return sum(each() is not None for each in kept)

    assert max(local.run(2, program)) <= 1


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_receive_with_the_wrong_tag_names_the_one_that_was_sent(own):
    if own.rank == 0:
        sent = own.isend(np.arange(3.0), 1, tag=4)
    wait_between_two(own)
    if own.rank == 1:
        own.deadline = 0.2
        text = r"for rank 0, which has sent a message with tag=4 \("
        with pytest.raises(DeadlineExceededError, match=text):
            own.recv(np.zeros(3), 0, tag=5)
        own.deadline = PATIENT
        assert own.recv(np.zeros(3), 0, tag=4).tolist() == [0, 1, 2]
    else:
        sent.wait()
    wait_between_two(own)


EXIT = """
import numpy as np, time, collectives
comm = collectives.world(deadline=20)
if comm.rank == 0:
    comm.isend(np.full(300_000, 1.5), 1)
    comm.irecv(np.zeros(3), 1)  # never sent
else:
    time.sleep(1.5)
    assert (comm.recv(np.zeros(300_000), 0) == 1.5).all()
print("ended well", flush=True)
"""


def test_dropped_handles_do_not_break_exit(launch):
    start = time.monotonic()
    ended = launch(2, [sys.executable, "-c", EXIT], timeout=60)
    lost = "irecv(from rank 1, tag=0): closed before a message came (<string>:6)\n"
    assert (ended.returncode, errors_of(ended)) == (0, lost)
    assert ended.stdout.count("ended well") == 2
    assert time.monotonic() - start < 20


LOST = """
import numpy as np, collectives
comm = collectives.world()
comm.barrier()
comm.deadline = 1
comm.isend(np.zeros(3_000_000), 1 - comm.rank)
"""


def test_messages_that_nobody_receives_are_named_at_exit(launch):
    ended = launch(2, [sys.executable, "-c", LOST], timeout=60)
    assert ended.returncode == 0
    lost = "messages that other ranks have not received when this rank ends are lost"
    assert errors_of(ended).count(lost) == 2, ended.stderr
