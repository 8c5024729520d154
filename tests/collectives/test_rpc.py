"""Requests, answers and notifications between ranks."""

import collections
import threading
import time

import numpy as np
import pytest

from collectives import Communicator, DeadlineExceededError, RankFailedError
from collectives.messaging.buffers import SendWindow
from collectives.messaging.remote_error import RemoteError, RemoteTracebackError, describe
from collectives.messaging.rpc import Endpoint
from collectives.transports import local


def on_threads(size, body):
    """Call `body(comm, mailbox)` on every rank of a world of threads; the results."""

    def one_rank(transport):
        comm = Communicator(transport, deadline=20)
        box = comm.mailbox()
        result = body(comm, box)
        comm.barrier()
        box.close()
        return result

    return local.run(size, one_rank)


def serve(endpoint, calls, count):
    """Receive until so many requests and notifications are there."""
    end = time.monotonic() + 20
    while len(calls) < count:
        assert time.monotonic() < end
        endpoint.step(0.1)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_each_request_gets_its_own_answer(comm):
    """Rank 0 answers in the opposite order; every rank notifies first."""
    box, calls = comm.mailbox(), []
    endpoint = Endpoint(box, calls.append)
    if comm.rank == 0:
        serve(endpoint, calls, 4 * (comm.size - 1))
        by_source = collections.defaultdict(list)
        for call in calls:
            by_source[call.source].append((call.number is None, call.body))
        for source, received in by_source.items():
            assert received == [(each < 2, 10 * source + each) for each in range(4)]
        for call in reversed([call for call in calls if call.number is not None]):
            endpoint.answer(call, -call.body, [call.arrays[0] * 2])
    else:
        for each in range(2):
            endpoint.notify(0, 10 * comm.rank + each)
        bodies = [10 * comm.rank + each for each in (2, 3)]
        pending = [endpoint.request(0, body, [np.full(3, body)]) for body in bodies]
        results = endpoint.results(pending, "the answers")
        for body, (value, arrays) in zip(bodies, results, strict=True):
            assert value == -body
            np.testing.assert_array_equal(arrays[0], np.full(3, 2 * body))
        assert not endpoint.outstanding
    box.close()


class UnpicklableError(Exception):
    """Has an argument that pickle refuses."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def test_a_remote_error_has_its_class_its_place_and_its_traceback():
    def body(comm, box):
        calls, errors = [], []
        endpoint = Endpoint(box, calls.append)
        if comm.rank == 0:
            for count in (1, 2):
                serve(endpoint, calls, count)
                refuse(endpoint, calls[-1])
            return None
        for kind in ("known", "unknown"):
            pending = endpoint.request(0, kind)
            with pytest.raises((KeyError, RemoteError)) as caught:
                endpoint.results([pending], "an answer")
            errors.append(caught.value)
        return errors

    def refuse(endpoint, call):
        try:
            raise KeyError(7) if call.body == "known" else UnpicklableError("seven")
        except Exception as error:
            endpoint.fail(call, describe(error, "the second shelf"))

    _, (known, unknown) = on_threads(2, body)
    assert (type(known), known.args) == (KeyError, (7,))
    assert type(unknown) is RemoteError
    assert str(unknown) == "UnpicklableError: seven"
    for error in (known, unknown):
        assert isinstance(error.__cause__, RemoteTracebackError)
        assert error.__cause__.place == "the second shelf"
        assert "in refuse" in error.__cause__.text


def test_a_late_answer_to_a_withdrawn_request_is_thrown_away():
    def body(comm, box):
        calls = []
        endpoint = Endpoint(box, calls.append)
        if comm.rank == 0:
            serve(endpoint, calls, 2)
            for call in calls:
                endpoint.answer(call, call.body)
            return None
        first, comm.deadline = endpoint.request(0, "first"), 0.3
        with pytest.raises(DeadlineExceededError, match="the first answer") as caught:
            endpoint.results([first], "the first answer")
        comm.deadline = 20
        assert caught.value.absent == (0,)
        assert not endpoint.outstanding
        second = endpoint.request(0, "second")
        assert endpoint.results([second], "the second answer")[0][0] == "second"
        return first.done()

    assert on_threads(2, body)[1] is False


def test_a_wait_for_a_rank_that_has_ended_names_it():
    def body(comm, box):
        endpoint = Endpoint(box, lambda call: None, "task {}".format, "has gone home")
        if comm.rank == 0:
            box.tell_end()
            return None
        end = time.monotonic() + 20
        while not endpoint.departed([0]):
            assert time.monotonic() < end
            endpoint.step(0.01)
        with pytest.raises(RankFailedError, match="task 0 has gone home"):
            endpoint.check_present(0)
        with pytest.raises(RankFailedError, match="nothing can be sent to task 0"):
            endpoint.request(0, "question")
        assert not endpoint.outstanding
        start = time.monotonic()
        with pytest.raises(RankFailedError, match="task 0 has gone home: an answer waited for it"):
            endpoint.wait(lambda: False, [0], "an answer")
        assert time.monotonic() - start < 5
        return True

    assert on_threads(2, body)[1] is True


class SlowSend:
    """A message on its way, which arrives when it is waited for."""

    peer = 0

    def __init__(self):
        self.arrived = False

    def done(self):
        return self.arrived

    def arrive(self):
        self.arrived = True


def test_a_window_waits_for_the_oldest_message():
    window, sent, waited = SendWindow(most_messages=2, most_bytes=100), [], []

    def send(copies):
        sent.append((SlowSend(), copies))
        return sent[-1][0]

    def wait(message):
        waited.append([each for each, _ in sent].index(message))
        message.arrive()

    given = np.arange(5.0)
    for number in range(4):
        window.make_room(wait)
        window.send(send, [given])
        given += 1
        np.testing.assert_array_equal(sent[number][1][0], np.arange(5.0) + number)
    # 40 bytes each: two fit, and the next message begins when a third is under way.
    assert waited == [0]
    window.make_room(wait)
    assert waited == [0, 1]
