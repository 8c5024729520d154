"""The thread that watches calls inside libraries."""

import subprocess
import sys
import threading
import time
import weakref

import pytest

from collectives.waiting import watchdog


class Counting:
    looks = 0

    def check_deadline(self):
        self.looks += 1


class Failing(Counting):
    def check_deadline(self):
        super().check_deadline()
        raise ZeroDivisionError


def test_one_that_can_not_be_looked_after_leaves_the_others_watched(caplog):
    failing, others = Failing(), [Counting() for _ in range(5)]
    for each in (*others, failing):
        watchdog.watch(each)
    end = time.monotonic() + 10
    while min(each.looks for each in others) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    assert min(each.looks for each in others) >= 3
    assert failing.looks == 1, "and says so at every look"
    assert "the watchdog can't check a deadline any more" in caplog.text


def test_what_was_watched_is_garbage_once_the_program_drops_it():
    """Though it was the last one that the thread has looked at."""
    seen = weakref.ref(kept := Counting())
    watchdog.watch(kept)
    end = time.monotonic() + 10
    while not kept.looks and time.monotonic() < end:
        time.sleep(0.01)
    del kept
    while seen() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert seen() is None


class Quiet:
    def check_deadline(self):
        return None


def test_what_is_watched_may_come_and_go_while_it_is_looked_at(hasty_threads):
    problems, looks, end = [], [], threading.Event()

    def check_deadline():
        while not end.is_set():
            try:
                watchdog._all_watched()
                looks.append(1)
            except RuntimeError as error:
                problems.append(error)

    looker = threading.Thread(target=check_deadline)
    looker.start()
    try:
        for _ in range(6):
            kept = [Quiet() for _ in range(200)]
            for each in kept:
                watchdog.watch(each)
    finally:
        end.set()
        looker.join()
    assert looks
    assert not problems


@pytest.mark.parametrize("ending", ["ctypes.PyDLL(None).sleep(20)", "None"])
def test_a_process_ends_though_mpi_can_not_end_the_job(ending):
    """MPI_Abort may wait for a host that can't be reached, holding Python's lock, or return."""
    program = f"""
import ctypes
from collectives.waiting import last_resort
last_resort.ABORT_SECONDS = 0.2
class Stuck:
    def Abort(self, code):
        {ending}
last_resort.abort(Stuck())
"""
    line = [sys.executable, "-c", program]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=15, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
