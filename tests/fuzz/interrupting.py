"""Exceptions and signals inside the calls of one rank, and stops of the whole process."""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import collectives

PACKAGE = str(Path(collectives.__file__).parent)


class AlarmError(Exception):
    """The exception of a signal's handler, as in test runners and schedulers."""


class ValueAlarmError(ValueError):
    """The same, with the name of an exception that the package catches as harmless."""


class BaseAlarmError(BaseException):
    """The same, as a BaseException."""


ALARMS = (AlarmError, ValueAlarmError, BaseAlarmError)


def inside(frame):
    """Whether the frame, or one of its callers, is the package's: the call has begun."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


@contextmanager
def raising_at_line(count, kind):
    """Raise `kind` where the package is about to run its `count`-th line from here on."""
    left = count

    def trace(frame, event, argument):
        return trace_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def trace_line(frame, event, argument):
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise kind(f"at line {frame.f_lineno} of {frame.f_code.co_name}")
        return trace_line

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def alarm_after(seconds, kind=None):
    """A signal after so many seconds, whose handler raises `kind` if that is inside a call."""

    def handle(number, frame):
        if kind is not None and inside(frame):
            raise kind("from a signal's handler")

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stop_for(pid, after, seconds):
    """Stop a process of this host for a while; returns the thread that does so."""

    def run():
        time.sleep(after)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread
