"""The calls of one group in the order of their submission, whether they are waited for or not.

torch's programs may call a collective with `async_op=True` on one rank and without on another, as
`Join` does: both kinds share one order and one communicator. A call that is waited for runs in the
caller's thread where no other is pending; the others run on the group's own thread. There a brief
call would take several times as long, so that it runs in the caller's thread too if all ranks come
soon: it then waits for no rank that may wait for this one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from collectives.torch.works import PendingWork
from collectives.waiting.wait_policy import WaitPolicy, calling_line

Action = Callable[[], None]
# What the other thread costs.
_HANDOVER_SECONDS = 5e-4


class CallQueue:
    """One group's pending calls, and the thread that makes them, which its first call starts."""

    def __init__(self, policy: WaitPolicy, all_come: Callable[[float], bool]) -> None:
        """`policy` is how the group's calls wait.

        `all_come` says whether all ranks make the next call within some seconds.
        """
        self._policy, self._all_come = policy, all_come
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.pending = 0
        """The number of calls that were submitted and have not ended."""

    def submit(self, work: PendingWork, action: Action, *, brief: bool) -> None:
        """Make the call once those before it have ended; the work receives its end.

        brief: whether its data take less time than another thread's start; the same on all ranks.
        """
        if brief and not self.pending and self._all_come(_HANDOVER_SECONDS):
            failed = _failure_of(action, calling_line())
            work.finish(failed)
            if failed is not None and not isinstance(failed, Exception):
                raise failed
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="collectives-torch", daemon=True
                )
                self._thread.start()
            self.pending += 1
            self._jobs.put(_Job(work, action, calling_line()))

    def drain(self) -> None:
        """Make the pending calls, and end the thread. A later call starts another."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        # No reference to a job remains while the thread waits for the next.
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        job = self._jobs.get()
        if job is None:
            return False
        with self._policy.sleeping_early():
            failed = _failure_of(job.action, job.line)
        with self._lock:
            self.pending -= 1
        job.work.finish(failed)
        return True


class _Job(NamedTuple):
    work: PendingWork
    action: Action
    line: str


def _failure_of(action: Action, line: str) -> BaseException | None:
    try:
        action()
    except BaseException as error:
        return _with_line(error, line)
    return None


def _with_line(error: BaseException, line: str) -> BaseException:
    """The error with the line that made the call, which its traceback does not show."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} (an asynchronous call of {line})", *error.args[1:])
    return error
