"""A lock that threads get in turn.

A thread that polls under an ordinary lock takes it again before one that waits for it has woken.
"""

from __future__ import annotations

import threading


class FairLock:
    """A lock as a context: a thread that waits precedes the one that released it.

    Code that has it must not enter it again. A signal's handler may raise between the lock and the
    code that it guards, as Ctrl+C does: a thread that has the lock from then on takes it over when
    it next enters.
    """

    def __init__(self) -> None:
        self._next, self._lock = threading.Lock(), threading.RLock()

    def __enter__(self) -> None:
        if not self._is_owned():
            try:
                with self._next:
                    self._lock.acquire()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *error: object) -> None:
        if self._is_owned():
            self._lock.release()

    def _is_owned(self) -> bool:
        """Whether this thread has it."""
        owned: bool = self._lock._is_owned()  # type: ignore[attr-defined]  # of RLock
        return owned
