"""The thread that looks after calls inside libraries."""

import sys
import threading
import time

import pytest

from collectives import watchdog


@pytest.fixture
def hasty_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Failing:
    def __init__(self):
        self.looks = 0

    def look(self):
        self.looks += 1
        raise ZeroDivisionError


def test_one_that_can_not_be_looked_after_leaves_the_others_watched(caplog):
    failing = Failing()
    watchdog.watch(failing)
    end = time.monotonic() + 10
    while failing.looks < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert failing.looks >= 2
    assert "a deadline can't be watched" in caplog.text


class Quiet:
    def look(self):
        return None


def test_what_is_watched_may_come_and_go_while_it_is_looked_at(hasty_threads):
    problems, end = [], threading.Event()

    def look():
        while not end.is_set():
            try:
                watchdog._all_watched()
            except RuntimeError as error:
                problems.append(error)

    looker = threading.Thread(target=look)
    looker.start()
    for _ in range(60):
        kept = [Quiet() for _ in range(200)]
        for each in kept:
            watchdog.watch(each)
    end.set()
    looker.join()
    assert not problems
