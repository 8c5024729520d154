"""The deadline of calls that wait inside a library, where no exception can be raised: the job ends.

All ranks have met before such a call, so that it hangs only if one of them stops in the middle.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Protocol

from collectives.waiting.wait_policy import WaitPolicy, calling_line, log

_LOOK_SECONDS = 0.2
# Beyond the deadline: to end the job is no small thing, and a rank may just wait for a core.
GRACE_SECONDS = 2.0

End = Callable[[str], None]


class Watched(Protocol):
    """What the watching thread looks after."""

    def look(self) -> None:
        """Do what is to be done once the deadline is over. Called a few times a second."""


class Watchdog:
    """A context around such calls, of one rank on one communicator."""

    def __init__(self, wait_policy: WaitPolicy, end: End) -> None:
        """`end` is given the reason; it doesn't return."""
        self._wait_policy, self._end = wait_policy, end
        self._since: float | None = None
        self._thread = 0

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._since = time.monotonic()
        watch(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Nothing is waited for any more."""
        self._since = None

    def look(self) -> None:
        """End the job if the deadline is over."""
        since, deadline = self._since, self._wait_policy.deadline
        if since is None or deadline is None or time.monotonic() - since < deadline + GRACE_SECONDS:
            return
        call = self._wait_policy.call
        frame: FrameType | None = sys._current_frames().get(self._thread)
        line = call.line or (calling_line(frame) if frame else "unknown line")
        self._end(
            f"{call}, was inside the MPI library for the deadline of"
            f" {deadline:g} s, from which no error can be raised: the job ends ({line})"
        )


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(watched: Watched) -> None:
    """Look after it from now on, as long as somebody holds it."""
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
        time.sleep(_LOOK_SECONDS)
        for watched in _all_watched():
            try:
                watched.look()
            except Exception:
                # The deadlines of all others hang on this thread.
                log.exception("a deadline can't be watched any more")
                with _lock:
                    _watched.discard(watched)


def _all_watched() -> list[Watched]:
    with _lock:
        # Another thread may add one meanwhile, which no set lets itself be read for.
        return list(_watched)
