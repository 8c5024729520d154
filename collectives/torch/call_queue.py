"""The calls of one group in the order of their submission, whether they are waited for or not.

torch's programs may call a collective with `async_op=True` on one rank and without on another, as
`Join` does: both kinds share one order and one communicator. A call that is waited for runs in the
caller's thread where no other is pending; the others run on the group's own thread. There a brief
call would take several times as long, so that it runs in the caller's thread too if the programs of
all ranks soon wait in it: then no program that the call waits for waits for this one, or computes.

Calls on a GPU run in the caller's thread. They must be enqueued in the order of the program, those
of several groups too: NCCL's kernels wait for each other. Over NCCL they are enqueued on a stream
beside the program's.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed import Work

from collectives.consistency.call_scope import CallScope
from collectives.errors import DeadlineExceededError, MismatchError
from collectives.shm.intents import Intents
from collectives.torch.works import PendingWork, done
from collectives.waiting.timer_slack import end_sleeps_in_time
from collectives.waiting.wait_policy import WaitPolicy, calling_line

Action = Callable[[], None]
# What the other thread costs.
_HANDOVER_SECONDS = 5e-4
# They take less time than the other thread's start. As DDP's first bucket.
_BRIEF_BYTES = 1 << 20


class CallQueue:
    """One group's pending calls, and the thread that makes them, which its first call starts."""

    def __init__(
        self,
        scope: CallScope,
        policy: WaitPolicy,
        on_gpus: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        """`scope` is that of the group's calls, `policy` is how they wait.

        `on_gpus` is a context for a call on a GPU, which says whether it is asynchronous.
        """
        self.scope, self._policy, self._on_gpus = scope, policy, on_gpus
        self._lock = threading.Lock()
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._drained: threading.Thread | None = None
        """The thread before it, which may still make calls."""
        self._served = threading.local()
        self.pending = 0
        """The number of calls that were submitted and have not ended."""

    def submit(self, outputs: list[Any], name: str, action: Action) -> Work:
        """Make the call once those before it have ended; its work, which may have ended.

        `outputs` are tensors, also in lists.
        """
        work = self._run_soon(outputs, name, action)
        if work is None:
            work = PendingWork(outputs, name)
            self._enqueue(work, action)
        return work

    def submit_on_gpu(
        self,
        outputs: list[Any],
        name: str,
        action: Action,
        arguments: Any,
        gpus: list[Any],
        asynchronous: bool,
    ) -> Work:
        """As `submit`, of tensors on one of these GPUs.

        `arguments` are the call's, with all tensors. `asynchronous`: the call runs beside what the
        program enqueues next.
        """
        self._finish_pending()
        if asynchronous:
            return self._run_beside(outputs, name, action, arguments, gpus)
        with self._on_gpus(False):
            action()
            enqueued = PendingWork(outputs, name, gpus)
            enqueued.finish(None)
        return enqueued

    def _finish_pending(self) -> None:
        jobs = getattr(self._served, "jobs", None)
        if jobs is not None:
            # A callback makes a call.
            while self.pending:
                if not self._run_next(jobs):
                    # Those of the next thread are pending; this one ends.
                    jobs.put(None)
                    break
        elif self.pending:
            last = PendingWork([], "the calls before")
            self._enqueue(last, lambda: None)
            last.wait()

    def _run_soon(self, outputs: list[Any], name: str, action: Action) -> Work | None:
        """Make a brief call here if all programs soon wait in it: its work, else None."""
        if self.pending or _bytes_of(outputs) > _BRIEF_BYTES:
            return None
        scope = self.scope
        check = scope.call_check
        # The next group may have the memory of one that was closed.
        if check is None or scope.broken is not None:
            return self._run_now(outputs, name, action, [])
        intents = check.intents
        if intents is None or not intents.all_wait(check.sequence + 1, _HANDOVER_SECONDS):
            return None
        return self._run_now(outputs, name, partial(_run_waiting, intents, action), [])

    def _run_beside(
        self, outputs: list[Any], name: str, action: Action, arguments: Any, gpus: list[Any]
    ) -> Work:
        tensors = list(_tensors_in(arguments))
        # A call gives a sparse tensor new memory, which must be of the program's stream.
        beside = all(each.layout is torch.strided for each in tensors)
        with self._on_gpus(beside):
            if beside:
                _note_use([each for each in tensors if each.is_cuda])
            return self._run_now(outputs, name, action, gpus)

    def _run_now(self, outputs: list[Any], name: str, action: Action, gpus: list[Any]) -> Work:
        failed = _failure_of(action)
        if failed is None and not gpus:
            return done(outputs)
        work = PendingWork(outputs, name, gpus)
        work.finish(None if failed is None else _with_line(failed, calling_line()))
        if failed is not None and not isinstance(failed, Exception):
            raise failed
        return work

    def _enqueue(self, work: PendingWork, action: Action) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve,
                    args=(self._jobs, self._drained),
                    name="collectives-torch",
                    daemon=True,
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
                # Another thread may make a call meanwhile.
                self._jobs, self._drained = queue.SimpleQueue(), thread
        if thread is not None:
            thread.join()

    def await_running(self, seconds: float) -> None:
        """Wait until a call that another thread makes has ended, no longer than that."""
        lock = self.scope.lock
        if lock.acquire(timeout=seconds):
            lock.release()

    def _serve(self, jobs: _Jobs, before: threading.Thread | None) -> None:
        """Make the calls of a queue, after those of another thread."""
        end_sleeps_in_time()
        if before is not None:
            before.join()
        self._served.jobs = jobs
        # No reference to a job remains while the thread waits for the next.
        while self._run_next(jobs):
            pass

    def _run_next(self, jobs: _Jobs) -> bool:
        job = jobs.get()
        if job is None:
            return False
        with self._policy.sleeping_early():
            self._policy.line = job.line
            failed = _failure_of(partial(self._run_queued, job.action))
            self._policy.line = None
        with self._lock:
            self.pending -= 1
        job.work.finish(None if failed is None else _with_line(failed, job.line))
        return True

    def _run_queued(self, action: Action) -> None:
        check = self.scope.call_check
        if check is not None and check.intents is not None and self.scope.broken is None:
            check.intents.note_queued(check.sequence + 1)
        action()


class _Job(NamedTuple):
    work: PendingWork
    action: Action
    line: str


_Jobs: TypeAlias = "queue.SimpleQueue[_Job | None]"


def _run_waiting(intents: Intents, action: Action) -> None:
    try:
        action()
    except BaseException:
        intents.end()
        raise


def _failure_of(action: Action) -> BaseException | None:
    try:
        action()
    except BaseException as error:
        return error
    return None


def reword(error: DeadlineExceededError | MismatchError, group: str) -> None:
    """Name the group of a call that has failed, in torch's words."""
    if isinstance(error, DeadlineExceededError):
        # torch's users and tests search for these words.
        error.args = (f"group {group!r}: Timed out : {error}",)
        return
    gone = [rank for rank, each in enumerate(error.calls) if each.startswith("exit(")]
    if gone:
        error.args = (f"group {group!r} was closed by rank {gone[0]}: {error}",)


def reword_monitored(error: DeadlineExceededError, rank: int) -> None:
    """Name the absent ranks of a monitored barrier, in gloo's words, which torch's tests read."""
    ranks = ", ".join(map(str, error.absent))
    absent = f"Rank {ranks}" if len(error.absent) == 1 else f"Ranks {ranks}"
    text = f"Rank {rank} timed out in monitoredBarrier"
    if rank:
        text = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while"
            " waiting for send/recv from rank 0"
        )
    error.args = (f"{text}. {absent} failed to pass monitoredBarrier: {error}",)


def _with_line(error: BaseException, line: str) -> BaseException:
    """The error with the line that made the call, which its traceback does not show."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} (an asynchronous call of {line})", *error.args[1:])
    return error


def _note_use(tensors: list[Any]) -> None:
    """Keep the memory of tensors, which may be freed before the current stream has used it."""
    if tensors and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(tensors[0].get_device())
        for each in tensors:
            each.record_stream(stream)


def _tensors_in(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, list | tuple):
        for each in arguments:
            yield from _tensors_in(each)
    elif isinstance(arguments, torch.Tensor):
        yield arguments


def _bytes_of(tensors: Any) -> float:
    """The bytes of dense tensors in lists; infinity if there are other tensors."""
    return sum(
        each.nbytes if each.layout is torch.strided else math.inf for each in _tensors_in(tensors)
    )
