"""The states of scheduled closures, and which error is raised when."""

import threading

import pytest

from strategies.coordinator.closure_queue import Closure, ClosureQueue
from strategies.errors import CancelledError
from tests.strategies.posts import wait_until


def filled(count, limit=100):
    queue, closures = ClosureQueue(limit), [Closure([]) for number in range(count)]
    for closure in closures:
        queue.put(closure)
    return queue, closures


def in_thread(function, *arguments):
    """A thread that calls it, and a list that gets its result or error."""
    outcome = []

    def run():
        try:
            outcome.append(function(*arguments))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_closures_are_taken_in_order_and_their_results_are_theirs():
    queue, closures = filled(3)
    taken = [queue.take() for _ in range(4)]
    assert taken == [*closures, None]
    for number, closure in reversed(list(enumerate(closures))):
        assert not queue.done()
        queue.finish(closure, number * 10)
    assert [closure.result.get() for closure in closures] == [0, 10, 20]
    assert queue.done()
    queue.join()


def test_join_waits_for_what_is_queued_and_for_what_runs():
    queue, closures = filled(2)
    thread, outcome = in_thread(queue.join)
    for closure in closures:
        assert queue.take() is closure
        thread.join(0.05)
        assert thread.is_alive()
        queue.finish(closure, None)
    thread.join(10)
    assert outcome == [None]


@pytest.mark.parametrize("call", ["join", "done", "put"])
def test_an_error_is_raised_once_when_nothing_runs_and_cancels_what_is_queued(call):
    queue, closures = filled(4)
    failing, running = queue.take(), queue.take()
    error = ZeroDivisionError("first")
    queue.fail(failing, error)
    assert queue.take() is None
    for closure in closures[2:]:
        with pytest.raises(CancelledError, match="first"):
            closure.result.get()
    arguments = [Closure([])] if call == "put" else []
    thread, outcome = in_thread(getattr(queue, call), *arguments)
    thread.join(0.05)
    assert thread.is_alive()
    queue.finish(running, "late")
    thread.join(10)
    assert outcome == [error]
    assert running.result.get() == "late"
    assert queue.done()
    queue.join()
    queue.put(Closure([]))
    assert not queue.done()


def test_of_two_errors_the_first_is_raised_and_both_are_fetched():
    queue, closures = filled(2)
    errors = [KeyError("one"), IndexError("two")]
    for closure, error in zip([queue.take(), queue.take()], errors, strict=True):
        queue.fail(closure, error)
    with pytest.raises(KeyError, match="one"):
        queue.join()
    queue.join()
    for closure, error in zip(closures, errors, strict=True):
        with pytest.raises(type(error)):
            closure.result.get()


def test_what_lost_its_worker_is_the_next_to_be_taken():
    queue, closures = filled(3, limit=3)
    first = queue.take()
    queue.put(Closure([]))  # the queue is full again
    queue.put_back(first)
    assert [queue.take() for _ in range(3)] == closures


def test_what_lost_its_worker_after_an_error_is_cancelled():
    queue, _ = filled(2)
    failing, running = queue.take(), queue.take()
    queue.fail(failing, ValueError("bad"))
    queue.put_back(running)
    with pytest.raises(CancelledError, match="bad"):
        running.result.get()
    with pytest.raises(ValueError, match="bad"):
        queue.done()
    assert queue.done()


def test_a_full_queue_makes_put_wait_for_room():
    queue, closures = filled(2, limit=2)
    thread, outcome = in_thread(queue.put, Closure([]))
    thread.join(0.05)
    assert thread.is_alive()
    assert queue.take() is closures[0]
    thread.join(10)
    assert outcome == [None]


def test_a_put_that_waits_for_room_gets_the_error():
    queue, _ = filled(2, limit=2)
    failing = queue.take()
    queue.put(Closure([]))
    thread, outcome = in_thread(queue.put, Closure([]))
    error = ValueError("bad")
    queue.fail(failing, error)
    thread.join(10)
    assert outcome == [error]


@pytest.mark.parametrize("call", ["join", "done", "put"])
def test_after_the_end_every_call_raises_its_error(call):
    queue, closures = filled(2)
    running = queue.take()
    queue.end(RuntimeError("nobody is left"))
    queue.end(RuntimeError("a later reason"))
    arguments = [Closure([])] if call == "put" else []
    thread, outcome = in_thread(getattr(queue, call), *arguments)
    thread.join(0.05)
    assert thread.is_alive()
    queue.put_back(running)
    thread.join(10)
    assert [str(each) for each in outcome] == ["nobody is left"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nobody is left"):
            getattr(queue, call)(*arguments)
    for closure in closures:
        with pytest.raises(RuntimeError, match="nobody is left"):
            closure.result.get()


def test_closures_of_another_thread_during_a_join_run_after_it():
    queue, (closure,) = filled(1)
    queue.take()
    joining, joined = in_thread(queue.join)
    wait_until(queue._gate.locked)
    putting, put = in_thread(queue.put, Closure([]))
    putting.join(0.05)
    assert putting.is_alive()
    queue.finish(closure, None)
    joining.join(10)
    putting.join(10)
    assert (joined, put) == ([None], [None])
    assert not queue.done()
