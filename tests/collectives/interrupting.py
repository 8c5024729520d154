"""Exceptions raised where a signal's handler may raise one, at a chosen one of such places."""

import dis
import sys
import threading
from pathlib import Path

import collectives
from collectives.transports.local import LocalTransport

PACKAGE = str(Path(collectives.__file__).parent)

# After these instructions Python runs the handlers of signals, and where a function begins.
_AFTER = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "POP_JUMP_BACKWARD")


class InterruptionError(Exception):
    """An exception as of a handler."""


class Interruption:
    """A context within which this thread is interrupted at a place: (code, position, time).

    `places` counts how often each was passed, in order; without a place, to the end. Times count
    from 1. A place is known by its code, since the number of those before it depends on how long
    the ranks wait for each other.
    """

    def __init__(self, place=None):
        self._place, self.places, self.where = place, {}, None
        self._last, self._codes, self._returned = {}, {}, None

    def __repr__(self):
        return f"interrupted at {self.where}"

    def __enter__(self):
        sys.settrace(self._begin)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _begin(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._pass(frame)
        return self._go_on

    def _go_on(self, frame, event, arg):
        if event == "return":
            self._last.pop(frame, None)
            self._returned = frame.f_back
        elif event == "opcode":
            last, self._last[frame] = self._last.get(frame), frame.f_lasti
            name = "" if last is None else self._name(frame.f_code, last)
            # No handler runs where a Python function returns, unless C has called it.
            inline, self._returned = self._returned is frame and name == "CALL", None
            if name.startswith(_AFTER) and not inline and not self._enters(frame):
                self._pass(frame)
        return self._go_on

    def _enters(self, frame):
        """Whether a `with` block is about to be entered: no handler runs before it."""
        return self._name(frame.f_code, frame.f_lasti) in ("BEFORE_WITH", "SETUP_WITH")

    def _name(self, code, position):
        if code not in self._codes:
            self._codes[code] = code.co_code
        return dis.opname[self._codes[code][position]]

    def _pass(self, frame):
        place = frame.f_code, frame.f_lasti
        self.places[place] = times = self.places.get(place, 0) + 1
        if self.where is None and (*place, times) == self._place:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise InterruptionError(self.where)


def share_memory(monkeypatch):
    """Let the threads of a world share memory as the ranks of a node do."""
    lock, made = threading.Lock(), {}

    def share(self, nbytes, count=None):
        self.times_shared = getattr(self, "times_shared", 0) + 1
        with lock:
            key = (self._switchboard, self._world, self.times_shared)
            if key not in made:
                made[key] = [memoryview(bytearray(nbytes)) for _ in range(count or self.size)]
            return made[key]

    monkeypatch.setattr(LocalTransport, "share", share)
    monkeypatch.setattr(LocalTransport, "share_one", lambda self, nbytes: share(self, nbytes, 1))
    monkeypatch.setattr(LocalTransport, "free", lambda self, segments: None)
    return made
