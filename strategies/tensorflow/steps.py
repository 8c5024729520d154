"""The steps of a worker of parameter servers, which run one at a time."""

from __future__ import annotations

import threading

from strategies.tensorflow.failures import StepsOverlapError, failed


class Steps:
    """The numbers of a process's steps, of which one is in progress at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last, self._failed = 0, 0
        self._present: int | None = None

    def begin(self) -> int:
        """The number of a new step; StepsOverlapError while another one is in progress.

        One in a `tf.function` that has failed is not: it has no end of its own.
        """
        with self._lock:
            if self._present is not None and self._failed == failed():
                raise _overlap()
            self._last += 1
            self._present, self._failed = self._last, failed()
            return self._last

    def check(self, number: int) -> None:
        """StepsOverlapError, for both, if another step has begun since."""
        with self._lock:
            if self._present != number:
                self._present = None
                raise _overlap()

    def end(self, number: int) -> None:
        """The step is complete, or has failed."""
        with self._lock:
            if self._present == number:
                self._present = None


def _overlap() -> StepsOverlapError:
    return StepsOverlapError(
        "two threads have called run, or have updated variables, at the same time: the steps of a"
        " worker of parameter servers run one at a time. Call run from one thread, or hold a"
        " threading.Lock; reads, assign, assign_add and assign_sub outside of run need none"
    )
