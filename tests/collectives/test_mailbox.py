"""One-sided messages."""

import errno
import subprocess
import sys
import threading
import time
import types

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

import collectives
from collectives import Communicator, Mailbox
from collectives.errors import UnusableError
from collectives.messaging.fair_lock import FairLock
from collectives.messaging.liveness import Process, Processes
from collectives.messaging.message import IncomingMessage, read, write
from collectives.shm import processes
from collectives.transports import local
from collectives.transports.base import MessageChannel, Sending
from collectives.transports.envelope import LARGEST_ENVELOPE, pack, unpack
from collectives.waiting import wait_policy
from collectives.waiting.wait_policy import WaitPolicy
from tests.slow import slow
from tests.worlds.dying import launcher_line, run_dying
from tests.worlds.programs import run_launcher

pytestmark = pytest.mark.both_mpis

worlds = pytest.mark.ranks(1, 2, 3, 5)

# A long one before short ones, which must not overtake it.
LENGTHS = [0, 1, 500_003, 500, 100_003, 513, 1100, 2]
DTYPES = ["float32", "int8", "bool", "complex128", "datetime64[s]", "U5", ml_dtypes.bfloat16]
DTYPES += [">f8", ml_dtypes.float8_e5m2, ml_dtypes.int4]


def ramp(rank, length, dtype="float64"):
    return (np.arange(length) % 7 + 10 * rank).astype(dtype)


def exchange(comm):
    """Every rank sends to every rank, itself included, messages of all lengths; those received."""
    box = comm.mailbox()
    sent = [
        box.send(peer, (comm.rank, peer, number), [ramp(comm.rank, length), ramp(peer, 3)])
        for number, length in enumerate(LENGTHS)
        for peer in range(comm.size)
    ]
    came = [box.receive(timeout=20) for _ in range(len(LENGTHS) * comm.size)]
    for each in sent:
        each.wait()
        assert each.done()
    comm.barrier()
    assert box.receive(timeout=0) is None
    box.close()
    box.close()
    return came


def check_exchange(comm, came):
    for source in range(comm.size):
        messages = [message for message in came if message.source == source]
        headers = [(source, comm.rank, number) for number in range(len(LENGTHS))]
        assert [message.header for message in messages] == headers
        for message, length in zip(messages, LENGTHS, strict=True):
            np.testing.assert_array_equal(message.arrays[0], ramp(source, length))
            np.testing.assert_array_equal(message.arrays[1], ramp(comm.rank, 3))
            assert all(array.flags.carray for array in message.arrays)


@worlds
@pytest.mark.mpi
def test_messages_from_every_rank_to_every_rank_in_their_order(comm):
    check_exchange(comm, exchange(comm))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_messages_that_take_long_are_not_overtaken(comm, monkeypatch):
    from collectives.transports import mpi_mailbox

    polls, advance = {}, mpi_mailbox._Arriving.advance

    def slowly(arriving):
        polls[arriving] = polls.get(arriving, 0) + 1
        return polls[arriving] > 50 and advance(arriving)

    monkeypatch.setattr(mpi_mailbox._Arriving, "advance", slowly)
    check_exchange(comm, exchange(comm))
    assert polls


@pytest.mark.parametrize("size", [1, 2, 5])
def test_messages_between_threads(size):
    def one_rank(transport):
        comm = Communicator(transport, deadline=20)
        check_exchange(comm, exchange(comm))
        return True

    assert local.run(size, one_rank) == [True] * size


@pytest.mark.parametrize("looks", [1, 2, 3, 4])
def test_a_message_that_comes_as_the_time_is_over_is_not_lost(looks):
    """It arrives between the polls of that `receive`."""
    box = Communicator(local.alone()).mailbox()
    box.send(0, "first")
    box.send(0, "second")
    take, limit, late = box._take, 0.01, []
    start = time.monotonic()

    def take_late():
        if time.monotonic() >= start + limit:
            late.append(None)
        return take() if len(late) >= looks else None

    box._take = take_late
    headers = [message.header for _ in range(4) if (message := box.receive(limit)) is not None]
    assert headers == ["first", "second"]


@worlds
@pytest.mark.mpi
@settings(max_examples=25)
@given(
    shapes=st.lists(array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9), max_size=4),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from("CFS"),
)
def test_arrays_of_all_kinds(comm, shapes, dtype, order):
    def arrays(rank):
        for shape in shapes:
            array = ramp(rank, int(np.prod(shape)), dtype).reshape(shape)
            yield np.repeat(array, 2, -1)[..., ::2] if order == "S" and shape else array

    following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = [np.array(a, order="F") if order == "F" else a for a in arrays(comm.rank)]
    box = comm.mailbox()
    box.send(following, None, sent)
    came = box.receive(timeout=20)
    expected = list(arrays(preceding))
    assert (came.source, came.header, len(came.arrays)) == (preceding, None, len(expected))
    for array, right in zip(came.arrays, expected, strict=True):
        assert (array.dtype, array.shape) == (right.dtype, right.shape)
        np.testing.assert_array_equal(array, right)
    box.close()


@pytest.mark.parametrize("lengths", [[], [0], [5, 0, 17], [LARGEST_ENVELOPE], [4000] * 5, [4097]])
def test_an_envelope_holds_what_is_short(lengths):
    buffers = [np.full(length, place + 1, np.uint8) for place, length in enumerate(lengths)]
    envelope, following = pack([buffer.data for buffer in buffers])
    came, unfilled = unpack(envelope)
    assert len(envelope) <= LARGEST_ENVELOPE + 16 * (len(lengths) + 1)
    assert [len(each) for each in following] == [len(each) for each in unfilled]
    for buffer, content in zip(unfilled, following, strict=True):
        buffer[:] = content
    for buffer, right in zip(came, buffers, strict=True):
        np.testing.assert_array_equal(buffer, right)
        assert buffer.ctypes.data % 16 == 0


def test_contiguous_arrays_are_sent_and_read_in_place():
    array = np.ones((3, 4))
    _, content = write("header", [array])
    assert np.shares_memory(np.frombuffer(content, np.uint8), array)
    letter = IncomingMessage.copied(0, write("header", [array]))
    message = read(letter)
    assert np.shares_memory(message.arrays[0], letter.buffers[1])
    assert message.arrays[0].flags.writeable


def test_a_message_to_oneself_is_a_copy():
    box = Communicator(local.alone()).mailbox()
    array, header = np.ones(3), {"list": [1]}
    sent = box.send(0, header, [array])
    array[:] = 7
    header["list"].append(2)
    assert sent.done()
    sent.wait()
    came = box.receive()
    assert came.header == {"list": [1]}
    np.testing.assert_array_equal(came.arrays[0], np.ones(3))
    assert box.alive(0)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_rank_that_writes_to_itself_receives_from_others_too(comm):
    box = comm.mailbox()
    if comm.rank:
        box.send(0, "from rank 1")
    else:
        end = time.monotonic() + 20
        box.send(0, "from rank 0")
        while box.receive().header != "from rank 1":
            assert time.monotonic() < end
            box.send(0, "from rank 0")
    box.close()


def test_a_mailbox_that_another_thread_closes_meanwhile(monkeypatch):
    box, closed = Communicator(local.alone()).mailbox(), []
    monkeypatch.setattr(box._channel, "close", lambda together: closed.append(together))
    tell_end = box.tell_end

    def after_another_thread():
        monkeypatch.setattr(box, "tell_end", tell_end)
        box.close()
        tell_end()

    monkeypatch.setattr(box, "tell_end", after_another_thread)
    box.close()
    assert closed == [True]


@pytest.mark.mpi
@pytest.mark.ranks(3, 5)
def test_messages_are_taken_from_whoever_sends(comm):
    """A late rank delays no other."""
    box = comm.mailbox()
    last = comm.size - 1
    if comm.rank == 0:
        others = [box.receive(timeout=20) for _ in range(last - 1)]
        assert sorted(message.source for message in others) == list(range(1, last))
        box.send(last, "now", [])
        assert box.receive(timeout=20).source == last
    else:
        if comm.rank == last:
            assert box.receive(timeout=20).header == "now"
        box.send(0, "here", [ramp(comm.rank, 50_000)])
    box.close()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_wait_for_messages_ends_in_time(comm):
    box = comm.mailbox()
    start = time.monotonic()
    assert box.receive(timeout=0) is None
    assert time.monotonic() - start < 10
    assert box.receive(timeout=0.2) is None
    assert 0.2 <= time.monotonic() - start < 10
    comm.barrier()
    box.close()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_rank_that_waits_long_leaves_its_core(comm):
    box = comm.mailbox()
    start = time.process_time()
    assert box.receive(timeout=1.0) is None
    assert time.process_time() - start < 0.5
    comm.barrier()
    box.close()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_server_thread_beside_calls_of_the_communicator(comm):
    box, answers = comm.mailbox(), comm.mailbox()

    def serve():
        for _ in range(20 * comm.size):
            asked = box.receive(timeout=20)
            answers.send(asked.source, asked.header, [asked.arrays[0] * 2])

    server = threading.Thread(target=serve)
    server.start()
    for number in range(20):
        for peer in range(comm.size):
            box.send(peer, number, [ramp(comm.rank, 3000 * number)])
        for _ in range(comm.size):
            answer = answers.receive(timeout=20)
            np.testing.assert_array_equal(
                answer.arrays[0], 2 * ramp(comm.rank, 3000 * answer.header)
            )
        total = comm.all_reduce(np.full(5, comm.rank + 1))
        assert (total == comm.size * (comm.size + 1) // 2).all()
    server.join()
    answers.flush()
    comm.barrier()
    box.close()
    answers.close()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_two_threads_of_one_mailbox(comm):
    """One thread waits in `receive` while the other sends."""
    box = comm.mailbox()
    came = []

    def take():
        came.extend(box.receive(timeout=20) for _ in range(200))

    taker = threading.Thread(target=take)
    taker.start()
    for number in range(200):
        box.send(1 - comm.rank, number, [ramp(comm.rank, number * 40)])
    taker.join()
    assert [message.header for message in came] == list(range(200))
    for message in came:
        right = ramp(1 - comm.rank, message.header * 40)
        np.testing.assert_array_equal(message.arrays[0], right)
    box.close()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_peer_that_does_not_take_a_message(comm):
    box = comm.mailbox()
    if comm.rank == 0:
        with Deadline(comm, 0.3):
            sent = box.send(1, "large", [np.ones(3_000_000)])
            with pytest.raises(collectives.DeadlineExceededError, match="rank 1") as raised:
                sent.wait()
            assert raised.value.absent == (1,)
            with pytest.raises(collectives.DeadlineExceededError, match=r"flush.*rank 1"):
                box.flush()
            assert not sent.done()
        box.send(1, "small")
        comm.barrier()
        sent.wait()
        box.flush()
    else:
        comm.barrier()
        assert box.receive(timeout=20).arrays[0].sum() == 3_000_000
        assert box.receive(timeout=20).header == "small"
    box.close()


class Deadline:
    def __init__(self, comm, seconds):
        self.comm, self.seconds = comm, seconds

    def __enter__(self):
        self.before, self.comm.deadline = self.comm.deadline, self.seconds

    def __exit__(self, *error):
        self.comm.deadline = self.before


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_closed_mailbox(comm):
    box = comm.mailbox()
    sent = box.send((comm.rank + 1) % comm.size, "nobody takes it", [np.ones(100_000)])
    box.close()
    assert sent.done()
    for call in (lambda: box.send(0, None), box.receive, lambda: box.receive(timeout=0)):
        with pytest.raises(UnusableError, match="the mailbox is closed"):
            call()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_mailbox_that_others_have_closed(comm):
    box = comm.mailbox()
    if comm.rank == 1:
        box.send(0, "last words")
        box.close()
    else:
        assert box.present(1)
        assert box.receive(timeout=20).header == "last words"
        with pytest.raises(collectives.RankFailedError, match="rank 1 has closed its mailbox"):
            box.receive()
        assert box.receive(timeout=0.3) is None
        with pytest.raises(collectives.RankFailedError, match="rank 1 has closed its mailbox"):
            box.send(1, None)
        assert box.alive(1)
        assert not box.present(1)
        assert box.present(0)
        box.close()


def test_wrong_arguments():
    box = Communicator(local.alone()).mailbox()
    for peer in (1, -1, 0.5):
        with pytest.raises((ValueError, TypeError), match="peer="):
            box.send(peer, None)
    with pytest.raises(ValueError, match="timeout=-1"):
        box.receive(timeout=-1)
    with pytest.raises(TypeError, match="timeout='1': must be a number"):
        box.receive(timeout="1")
    with pytest.raises(TypeError, match=r"arrays\[1\]"):
        box.send(0, None, [np.ones(2), np.array([object()])])
    with pytest.raises(Exception, match=r"pickle|local object"):
        box.send(0, lambda: None)
    assert box.receive(timeout=0) is None


DYING = """
import faulthandler, os, signal, sys, threading, time
import numpy as np
import collectives
faulthandler.dump_traceback_later(30, exit=True)
comm = collectives.world(deadline=20)
rank, size = comm.rank, comm.size
box = comm.mailbox()
last = size - 1
assert all(box.alive(peer) for peer in range(size))
"""

DEATHS = """
if rank == last:
    box.send(0, "to the end", [np.ones(9)])
    comm.barrier()  # the others have sent
    time.sleep(2)  # in which the message leaves, and the others leave the barrier
    os.kill(os.getpid(), signal.SIGKILL)
large = box.send(last, "large", [np.ones(3_000_000)])
comm.barrier()
if rank == 0:
    came = box.receive(timeout=10)
    assert (came.source, came.header) == (last, "to the end"), came
start = time.monotonic()
for wait in (large.wait, box.flush):
    try:
        wait()
    except collectives.RankFailedError as error:
        assert f"rank {last}" in str(error), error
    else:
        assert wait != large.wait, "no error"
assert time.monotonic() - start < 15
assert not box.alive(last)
try:
    box.send(last, "too late")
except collectives.RankFailedError as error:
    assert f"rank {last}" in str(error), error
else:
    raise AssertionError("no error")
for number in range(50):
    for peer in range(last):
        box.send(peer, number, [np.full(number * 1000, rank)])
came = [box.receive(timeout=10) for _ in range(50 * last)]
for peer in range(last):
    assert [each.header for each in came if each.source == peer] == list(range(50))
box.close()
open(os.path.join(os.environ["MARKS"], str(rank)), "w").close()
os._exit(0)
"""


@pytest.mark.parametrize("size", [*slow(2), 3])
def test_the_others_go_on_when_a_rank_dies(size, tmp_path):
    ended = run_dying(size, DYING + DEATHS, tmp_path)
    survivors = sorted(int(path.name) for path in tmp_path.iterdir())
    assert survivors == list(range(size - 1)), ended.stderr


TORN = """
class Interrupted:
    # MPI's communicator, of which one call is interrupted once it has been made.
    def __init__(self, comm, call, left):
        self.comm, self.call, self.left = comm, call, left
    def __getattr__(self, name):
        function = getattr(self.comm, name)
        def call(*arguments):
            result = function(*arguments)
            self.left -= name == self.call and result is not None
            if self.left == 0:
                self.left = -1
                raise KeyboardInterrupt
            return result
        return call

torn = 0 if CALL == "Isend" else 1
rows = [np.full(20_000, float(number)) for number in range(4)]
if rank == torn:
    box._channel._comm = Interrupted(box._channel._comm, CALL, 1 if CALL == "Improbe" else 3)
comm.barrier()
try:
    if rank == 0:
        box.send(1, "first", rows)
    else:
        came = box.receive(timeout=2)
        assert came is None, came.header
except KeyboardInterrupt:
    assert rank == torn
    for call in (lambda: box.send(1 - rank, "later"), lambda: box.receive(timeout=0)):
        try:
            call()
        except RuntimeError as error:
            assert "an exception has ended a transfer halfway" in str(error), error
        else:
            raise AssertionError("no error")
    box.close()
else:
    assert rank != torn
open(os.path.join(os.environ["MARKS"], str(rank)), "w").close()
comm.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("call", ["Isend", *slow("Irecv", "Improbe")])
def test_a_transfer_that_is_interrupted_halfway(call, tmp_path):
    """Later messages would fill the rest of it: there are none."""
    ended = run_dying(2, DYING + f"CALL = {call!r}" + TORN, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], ended.stderr


def test_the_end_of_a_program_after_an_interrupted_transfer(tmp_path):
    """It ends the job: the others can't learn that this rank sends nothing more."""
    serving = TORN.replace("comm.barrier()\nos._exit(0)", "if rank != torn: box.receive()")
    program = [sys.executable, "-c", DYING + "CALL = 'Isend'" + serving]
    line = launcher_line(2, program, deaths=False)
    ended = run_launcher(line, {"MARKS": str(tmp_path)}, timeout=60)
    assert ended.returncode
    assert "halfway: this process ends without MPI" in ended.stderr


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_closing_after_thousands_of_messages_that_came_at_once(comm):
    from mpi4py import MPI

    # So many that Open MPI needs the receiver's progress at the end; MPICH is slow.
    count = 12_000 if "Open MPI" in MPI.Get_library_version() else 400
    box = comm.mailbox()
    if comm.rank == 1:
        for number in range(count):
            box.send(0, number, [np.full(20_000, number % 251, np.uint8)])
        comm.send(np.ones(1), 0)
    if comm.rank == 0:
        comm.recv(np.zeros(1), 1)
        for number in range(count):
            message = box.receive(timeout=20)
            assert (message.header, message.arrays[0][-1]) == (number, number % 251)
    with Deadline(comm, 20):
        box.close()
        # A rank that waits here makes no progress for messages of MPI.
        comm.barrier()


class Held(Sending):
    """A message that no rank receives; counts the polls."""

    looks = 0

    def done(self):
        Held.looks += 1
        return False


class HoldingPost(MessageChannel):
    def send(self, buffers, peer):
        return Held()

    def poll(self):
        return None

    def close(self, *, together):
        pass


def test_what_nobody_takes_does_not_slow_down_what_follows():
    processes = Processes([Process(1, "here"), Process(2, "elsewhere")], 0)
    box = Mailbox(HoldingPost(), processes, 0, WaitPolicy())
    Held.looks = 0
    for number in range(1000):
        box.send(1, number)
    assert Held.looks <= 1000


def test_a_message_of_the_last_moment_is_not_lost(monkeypatch):
    """It arrives when the time is over, just before the last poll."""
    for turn in range(20):
        box = Communicator(local.alone()).mailbox()
        box.send(0, turn)
        over, take = [], box._take
        start = time.monotonic()

        def sleep(seconds, start=start, over=over):
            if time.monotonic() - start >= 0.01:
                over.append(True)

        clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr(wait_policy, "time", clock)
        monkeypatch.setattr(box, "_take", lambda over=over, take=take: take() if over else None)
        message = box.receive(timeout=0.01)
        assert message is not None
        assert message.header == turn


def test_a_closed_mailbox_is_not_kept():
    comm = Communicator(local.alone())
    for _ in range(3):
        comm.mailbox().close()
    kept = comm.mailbox()
    assert comm._mailboxes == [kept]


def test_a_process_that_is_reaped_while_it_is_looked_at_has_died(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def opened(*arguments, **named):
        stat = open(*arguments, **named)  # noqa: SIM115 - the caller closes it
        child.communicate(b"\n")
        return stat

    assert processes.is_alive(child.pid)
    monkeypatch.setattr(processes, "open", opened, raising=False)
    assert not processes.is_alive(child.pid)


def test_a_process_counts_as_alive_where_no_file_can_be_opened(monkeypatch):
    def opened(*arguments, **named):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(processes, "open", opened, raising=False)
    assert processes.is_alive(1)


def test_one_array_is_no_list_of_arrays():
    with pytest.raises(TypeError, match="arrays is one array: must be a list"):
        write("header", np.zeros(3))
    with pytest.raises(TypeError, match="arrays is a NoneType: must be a list"):
        write("header", None)


def test_a_lock_that_an_interrupt_has_left_is_entered_again():
    lock, entered = FairLock(), threading.Event()

    def enter():
        with lock:
            entered.set()

    def others_enter():
        entered.clear()
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        return entered.wait(10)

    lock.__enter__()  # without an exit, as where a signal's handler raises before the code
    with lock:
        pass
    assert others_enter()
    inner = lock._lock

    class Interrupted:
        def acquire(self):
            lock._lock = inner
            inner.acquire()
            raise KeyboardInterrupt

    lock._lock = Interrupted()
    lock._lock._is_owned = inner._is_owned
    with pytest.raises(KeyboardInterrupt), lock:
        raise AssertionError("not reached")
    assert others_enter()
