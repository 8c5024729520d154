"""A lock that threads get in turn.

A thread that polls under an ordinary lock takes it again before one that waits for it has woken.
"""

from __future__ import annotations

import threading


class FairLock:
    """A lock as a context: a thread that waits precedes the one that released it."""

    def __init__(self) -> None:
        self._next, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
