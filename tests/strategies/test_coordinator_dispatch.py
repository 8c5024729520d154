"""Workers that run closures, fail and die, as threads of one process."""

import collections
import contextlib
import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import RankFailedError
from collectives.messaging.rpc import Call, Endpoint
from strategies.coordinator.closure_queue import Closure, ClosureQueue
from strategies.coordinator.dispatcher import Dispatcher
from strategies.coordinator.link import End, Link, Run
from strategies.coordinator.packing import pack, unpack
from strategies.coordinator.worker import Worker
from strategies.errors import CancelledError, RemoteTracebackError
from tests.slow import slow
from tests.strategies.posts import (
    CHIEF,
    FragileBox,
    Letter,
    MessageChannel,
    PlainReferences,
    PostBox,
    call_plainly,
    start_worker,
    wait_until,
)

REFERENCES = PlainReferences()
PATIENCE_SECONDS = 30


class Cluster:
    """A chief and its workers, and a server that does nothing."""

    def __init__(self, deaths, box_of_chief=PostBox):
        """`deaths`: for each worker the arguments of its FragileBox."""
        self.post = MessageChannel(len(deaths) + 2)
        self.workers = {rank + 1: f"worker {rank} (rank {rank + 1})" for rank in range(len(deaths))}
        self.server = len(deaths) + 1
        self.threads = [
            start_worker(FragileBox(self.post, rank, **death))
            for rank, death in zip(self.workers, deaths, strict=True)
        ]
        self.queue = ClosureQueue()
        servers = {self.server: f"ps 0 (rank {self.server})"}
        self.link = Link(box_of_chief(self.post, CHIEF), CHIEF, self.workers, servers)
        self.dispatcher = Dispatcher(
            self.queue, self.link, lambda _, arrays: unpack(arrays, REFERENCES)
        )

    def schedule(self, fn, *args):
        closure = Closure(pack((fn, args, {}), REFERENCES))
        self.queue.put(closure)
        self.dispatcher.dispatch()
        return closure.result

    def give_up(self):
        """Release all waiting threads."""
        self.queue.end(TimeoutError("the test takes too long"))
        self.dispatcher._put_back_running()

    def end(self):
        self.dispatcher.end()
        self.link.end()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@contextlib.contextmanager
def cluster(*deaths, **options):
    made = Cluster(deaths, **options)
    alarm = threading.Timer(PATIENCE_SECONDS, made.give_up)
    alarm.start()
    try:
        yield made
    finally:
        alarm.cancel()
        made.end()


class Board:
    """Results that the functions, which all run in this process, store for the test."""

    def __init__(self):
        self.lock = threading.Lock()
        self.runs = collections.Counter()
        self.running = 0
        self.open = threading.Event()


BOARD = Board()


@pytest.fixture(autouse=True)
def board():
    BOARD.__init__()
    return BOARD


def work(number, error=None):
    with BOARD.lock:
        BOARD.running += 1
        BOARD.runs[number] += 1
    try:
        if error is not None:
            raise error
        return number * number
    finally:
        with BOARD.lock:
            BOARD.running -= 1


def wait_for_the_board():
    assert BOARD.open.wait(10)


def test_results_are_returned_and_every_worker_works():
    with cluster({}, {}, {}) as made:
        results = [made.schedule(work, number) for number in range(50)]
        made.queue.join()
        assert [result.get() for result in results] == [number**2 for number in range(50)]
        assert BOARD.runs == dict.fromkeys(range(50), 1)


def test_a_free_worker_does_not_wait_for_a_busy_one():
    with cluster({}, {}) as made:
        slow = made.schedule(wait_for_the_board)
        assert [made.schedule(work, number).get() for number in range(20)][-1] == 361
        assert not made.queue.done()
        BOARD.open.set()
        assert slow.get() is None
        made.queue.join()


@pytest.mark.parametrize("when", ["before_answering", *slow("before_running")])
def test_what_a_dead_worker_ran_is_run_by_another(when):
    # So many that the scheduler of threads gives the first worker three of them.
    with cluster({when: 3}, {}) as made:
        results = [made.schedule(work, number) for number in range(400)]
        made.queue.join()
        assert [result.get() for result in results] == [number**2 for number in range(400)]
        extra = sum(BOARD.runs.values()) - 400
        assert extra == (1 if when == "before_answering" else 0)


class LateBox(PostBox):
    """Rank 1's messages arrive during the check whether it is alive, and after it."""

    def receive(self, timeout=None):
        letter = super().receive(timeout)
        if letter is None or letter.source != 1:
            return letter
        self.kept = letter
        return None

    def alive(self, peer):
        if peer != 1 or not hasattr(self, "kept"):
            return True
        if not hasattr(self, "given"):
            self.given = True
            self.post.kill(1)
            self.post.inboxes[CHIEF].append(self.kept._replace(source=-1))
        return False


class LateChief(LateBox):
    """Restores the source of the late message."""

    def receive(self, timeout=None):
        letter = super().receive(timeout)
        return letter and letter._replace(source=abs(letter.source))


def test_an_answer_before_the_detection_of_a_death_is_used():
    with cluster({}, {}, box_of_chief=LateChief) as made:
        results = [made.schedule(work, number) for number in range(5)]
        made.queue.join()
        assert [result.get() for result in results] == [number**2 for number in range(5)]
        assert BOARD.runs == dict.fromkeys(range(5), 1)


def test_an_answer_after_the_detection_of_a_death_is_ignored():
    with cluster({}, {}) as made:
        lost = made.schedule(wait_for_the_board)
        made.post.kill(1)
        wait_until(lambda: 1 not in made.dispatcher._living)
        made.post.inboxes[CHIEF].append(late_answer(1, 0, "late"))
        BOARD.open.set()
        assert lost.get() is None
        assert made.schedule(work, 3).get() == 9
        made.queue.join()


class UnwarnedBox(PostBox):
    """A box that notices a death by what it sends alone."""

    def alive(self, peer):
        return True


def test_what_a_worker_ran_that_a_notification_lost_is_run_by_another():
    with cluster({}, {}, box_of_chief=UnwarnedBox) as made:
        lost = made.schedule(wait_for_the_board)
        wait_until(lambda: not made.post.inboxes[1])
        made.post.kill(1)
        made.dispatcher.notify_all(None, pack(None, REFERENCES))
        BOARD.open.set()
        assert lost.get() is None
        made.queue.join()


def late_answer(source, number, value):
    """The letter with which a worker answers the request of this number."""
    box = WatchedBox([])
    request = Call(CHIEF, number, Run(), [])
    Endpoint(box, None).answer(request, None, pack(value, REFERENCES))
    return Letter(source, *box.sent[0])


def test_without_workers_every_call_says_so():
    with cluster({"before_running": 2}, {"before_running": 1}) as made:
        results = [made.schedule(work, number) for number in range(5)]
        for call in (made.queue.join, made.queue.done, lambda: made.schedule(work, 9)):
            with pytest.raises(RankFailedError, match=r"no worker is left of worker 0 \(rank 1\)"):
                call()
        assert outcome_of(results[0]) == 0 or outcome_of(results[1]) == 1
        with pytest.raises(RankFailedError, match="no worker is left"):
            results[4].get()


def test_a_dead_server_ends_it_once_nothing_runs():
    with cluster({}, {}) as made:
        made.schedule(wait_for_the_board)
        made.post.kill(made.server)
        threading.Timer(0.3, BOARD.open.set).start()
        with pytest.raises(RankFailedError, match=r"ps 0 \(rank 3\) has died"):
            made.queue.join()
        assert BOARD.open.is_set()
        with pytest.raises(RankFailedError, match="has died"):
            made.schedule(work, 1)


def test_an_error_has_the_workers_traceback():
    with cluster({}) as made:
        result = made.schedule(work, 1, KeyError("wrong"))
        for call in (made.queue.join, result.get):
            with pytest.raises(KeyError, match="wrong") as caught:
                call()
            cause = caught.value.__cause__
            assert isinstance(cause, RemoteTracebackError)
            assert "on worker 0 (rank 1)" in str(cause)
            assert "in work" in str(cause)


def test_the_end_cancels_what_did_not_run():
    made = Cluster([{}])
    running, queued = made.schedule(wait_for_the_board), made.schedule(work, 1)
    made.dispatcher.end()
    made.dispatcher.end()
    for result in (running, queued):
        with pytest.raises(CancelledError, match="the coordinator has ended"):
            result.get()
    BOARD.open.set()
    made.end()
    assert not BOARD.runs


class BrokenBox(PostBox):
    """Fails at the second closure, as a mailbox that is closed too early."""

    def send(self, peer, header, arrays=()):
        if isinstance(getattr(header, "body", None), Run) and header.number == 1:
            raise RuntimeError("the mailbox is closed")
        return super().send(peer, header, arrays)


def test_nothing_is_lost_where_the_chief_cannot_send():
    with cluster({}, box_of_chief=BrokenBox) as made:
        slow = made.schedule(wait_for_the_board)
        queued = Closure(pack((work, (2,), {}), REFERENCES))
        made.queue.put(queued)
        BOARD.open.set()
        with pytest.raises(RuntimeError, match="mailbox is closed"):
            made.queue.join()
        assert slow.get() is None
        with pytest.raises(RuntimeError, match="mailbox is closed"):
            queued.result.get()


class InterruptedBox(PostBox):
    """Ctrl+C while the main thread sends a closure, or the end."""

    armed = False

    def send(self, peer, header, arrays=()):
        if self.armed and threading.current_thread() is threading.main_thread():
            self.armed = False
            raise KeyboardInterrupt
        return super().send(peer, header, arrays)


def test_what_an_interrupt_leaves_is_run_or_ended():
    with cluster({}, box_of_chief=InterruptedBox) as made:
        made.schedule(work, 0).get()
        made.link.box.armed, numbers = True, itertools.count(1)
        with pytest.raises(KeyboardInterrupt):
            collections.deque((made.schedule(work, number) for number in numbers), 0)
        made.queue.join()
        assert BOARD.runs == dict.fromkeys(range(next(numbers)), 1)
        made.link.box.armed = True
        with pytest.raises(KeyboardInterrupt):
            made.dispatcher.end()
        made.dispatcher.end()
        for thread in made.threads:
            thread.join(10)
            assert not thread.is_alive()


class WatchedBox:
    """A worker's messages; each answer must be sent before the next one is received."""

    rank = 1

    def __init__(self, letters):
        self.letters, self.under_way, self.sent = letters, 0, []

    def receive(self, timeout):
        assert not self.under_way
        return self.letters.pop(0)

    def send(self, peer, header, arrays):
        assert peer == CHIEF
        self.under_way += 1
        self.sent.append((header, arrays))
        return self

    def wait(self):
        self.under_way -= 1


def test_an_answer_has_gone_before_the_next_function_may_change_its_arrays():
    chief = WatchedBox([])
    for number in (4, 5):
        Endpoint(chief, None).request(CHIEF, Run(), pack((work, (number,), {}), REFERENCES))
    Endpoint(chief, None).notify(CHIEF, End())
    box = WatchedBox([Letter(CHIEF, *each) for each in chief.sent])
    link = Link(box, CHIEF, {1: "worker 0 (rank 1)"}, {})
    Worker(link, call_plainly, REFERENCES, None).serve()
    assert [unpack(arrays, REFERENCES) for _, arrays in box.sent] == [16, 25]


deaths = st.fixed_dictionaries(
    {},
    optional={
        "before_running": st.integers(1, 6),
        "before_answering": st.integers(1, 6),
    },
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("schedule"), st.booleans()),
        st.tuples(st.just("schedule"), st.just(True)),
        st.sampled_from([("join",), ("done",)]),
    ),
    max_size=25,
)


class NumberedError(Exception):
    """The failure of one closure."""


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(deaths, min_size=1, max_size=3), actions)
def test_whatever_fails_and_dies(workers, actions):
    """Each closure runs at least once unless it is cancelled; each error is raised once."""
    BOARD.__init__()
    with cluster(*workers) as made:
        results, surfaced, lost = [], [], False
        for action in [*actions, ("join",), ("join",)]:
            try:
                if action[0] == "schedule":
                    number = len(results)
                    error = None if action[1] else NumberedError(number)
                    results.append((error, made.schedule(work, number, error)))
                elif action[0] == "join":
                    made.queue.join()
                    assert BOARD.running == 0
                elif made.queue.done():
                    assert BOARD.running == 0
            except NumberedError as error:
                assert BOARD.running == 0
                surfaced.append(error.args[0])
                # No more results of earlier closures may arrive.
                assert lost or made.queue.done()
            except RankFailedError:
                lost = True
        outcomes = [outcome_of(result) for _, result in results]
    # All workers must have died for that.
    assert not lost or all(workers)
    assert len(surfaced) == len(set(surfaced))
    failed = {
        number for number, outcome in enumerate(outcomes) if isinstance(outcome, NumberedError)
    }
    assert set(surfaced) <= failed
    assert lost or bool(surfaced) == bool(failed)
    for number, ((error, _), outcome) in enumerate(zip(results, outcomes, strict=True)):
        check_outcome(number, error, outcome, lost, bool(failed))


def outcome_of(result):
    try:
        return result.get()
    except (NumberedError, CancelledError, RankFailedError) as error:
        return error


def check_outcome(number, error, outcome, lost, some_failed):
    if isinstance(outcome, CancelledError):
        assert some_failed
        return
    if isinstance(outcome, RankFailedError):
        assert lost
        return
    assert BOARD.runs[number] >= 1
    if error is None:
        assert outcome == number * number
    else:
        assert outcome.args == error.args
