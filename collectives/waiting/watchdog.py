"""Deadline of calls that block inside a library, where no exception can be raised.

The watchdog ends the job. All ranks have synchronized before such a call, so that it blocks for
ever only if a rank stops in the middle of it.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from collectives.waiting.wait_policy import WaitPolicy, calling_line, log

_POLL_SECONDS = 0.2
# Added to the deadline, because ending the job is drastic and a rank may only wait for a core.
GRACE_SECONDS = 2.0

End = Callable[[str], None]


class Watched(Protocol):
    """An object that the watchdog thread checks."""

    def check_deadline(self) -> None:
        """Act if the deadline has passed. Called a few times a second."""


class Watchdog:
    """Context around the blocking calls of one rank on one communicator."""

    def __init__(self, wait_policy: WaitPolicy, end: End) -> None:
        """`end` receives the reason and does not return."""
        self._wait_policy, self._end = wait_policy, end
        self._since: float | None = None
        self._thread = 0

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._since = time.monotonic()
        watch(self)

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """No call is watched any more."""
        self._since = None

    def check_deadline(self) -> None:
        """End the job if the deadline has passed."""
        since, deadline = self._since, self._wait_policy.deadline
        if since is None or deadline is None or time.monotonic() - since < deadline + GRACE_SECONDS:
            return
        call = self._wait_policy.call
        frame: FrameType | None = sys._current_frames().get(self._thread)
        line = self._wait_policy.line or (calling_line(frame) if frame else "unknown line")
        self._end(
            f"{call}, was inside a library (MPI or NCCL) for the deadline of"
            f" {deadline:g} s, from which no error can be raised: the job ends ({line})"
        )


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(watched: Watched) -> None:
    """Check the object from now on, until it is garbage-collected."""
    global _thread
    if watched in _watched and _thread is not None and _thread.is_alive():
        return
    with _lock:
        _watched.add(watched)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="collectives-watchdog", daemon=True)
            _thread.start()


def _run() -> None:
    while True:
        time.sleep(_POLL_SECONDS)
        for watched in _all_watched():
            try:
                watched.check_deadline()
            except Exception:
                # The deadlines of all other objects depend on this thread.
                log.exception("the watchdog can't check a deadline any more")
                with _lock:
                    _watched.discard(watched)
            del watched  # which this frame would keep alive


def _all_watched() -> list[Watched]:
    with _lock:
        # Copied under the lock, because a set must not change while it is iterated.
        return list(_watched)
