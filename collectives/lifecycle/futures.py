"""Asynchronous calls: a thread makes their progress while the caller computes."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic, NamedTuple, TypeVar

from collectives.calls import Operation
from collectives.consistency.flight_recorder import Entry, FlightRecorder
from collectives.consistency.signature import Signature
from collectives.errors import ENDED, CollectiveError, MismatchError, UnusableError, in_step
from collectives.execution.cost_model import CostParameters
from collectives.execution.engine import Engine
from collectives.lifecycle import nodes
from collectives.lifecycle.failures import failures
from collectives.lifecycle.nodes import Topology
from collectives.transports.base import Transport
from collectives.waiting.timer_slack import end_sleeps_in_time
from collectives.waiting.wait_policy import WaitPolicy, calling_line, check_timeout, log

Result = TypeVar("Result")
Tuned = tuple[CostParameters, str]

_CLOSE = Signature("close")
_END = _CLOSE._replace(scope=ENDED)
# How long the final call waits for ranks that may be in an asynchronous call, before it is retried.
_RETRY_SECONDS = 0.5
# The number of a call that is not the program's.
_OWN = -1


class Handle(Generic[Result]):
    """The future result of an asynchronous call.

    The handle may be dropped: the call is completed anyway, at the latest before the program exits.
    Its exception is logged by the next asynchronous call then, or at the program's end.
    """

    def __init__(self, future: Future[Result]) -> None:
        self._future, self._process = future, os.getpid()

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the call, and return its result; every wait returns the same object.

        Raises the call's own error, such as a MismatchError or DeadlineExceededError; TimeoutError
        if the call has not ended after `timeout` seconds, while it continues; UnusableError in a
        forked child.
        """
        timeout = check_timeout(timeout)
        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        if os.getpid() != self._process and not self._future.done():
            raise UnusableError("this process is a forked child of the rank, and can't wait")
        try:
            return self._future.result(timeout)
        except BaseException as error:
            if self._future.done() and error is self._future.exception():
                failures.saw(self._future)
            elif isinstance(error, FutureTimeoutError):
                # Python 3.10's futures raise a different TimeoutError.
                raise TimeoutError(f"not done after {timeout} s") from error
            raise


class ProgressThread:
    """The thread that runs asynchronous calls, in the order of their submission on every rank.

    It uses a duplicate of the communicator, so that its messages do not match those of blocking
    calls.
    """

    def __init__(self, transport: Transport, topology: Topology, policy: WaitPolicy) -> None:
        """A call has the deadline that `policy`, that of the blocking calls, has at its begin."""
        self._transport, self._topology, self._policy = transport, topology, policy
        self.recorder: FlightRecorder | None = None
        self._closed = self._settled = False
        self._final_call: Handle[Any] | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="collectives-progress", daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, operation: Operation, line: str, tuned: Tuned | None) -> Handle[Any]:
        """Queue the operation and return at once. RuntimeError after `begin_close`.

        `line` is the user's source line, `tuned` the cost parameters to use, and their source.
        """
        failures.report()
        return self._queue(_Job(operation, line, Future(), tuned, failures.begin()))

    def _queue(self, job: _Job) -> Handle[Any]:
        if self._closed:
            raise in_step(RuntimeError("asynchronous calls have ended: the program is exiting"))
        self._jobs.put(job)
        return Handle(job.future)

    def entries(self) -> list[Entry]:
        """The recorded calls."""
        return [] if self.recorder is None else self.recorder.entries()

    def signal_end(self) -> None:
        """Signal ranks that wait for this one's asynchronous calls that the program ends here.

        Returns at once; does nothing while an earlier signal is in progress. The signal is the
        thread's own final call, made early: if all ranks make it, nothing is left to do. A separate
        call, withdrawn after a while in favour of the final one, could be reported as a mismatch by
        a rank that arrived meanwhile.
        """
        if not self._closed and (self._final_call is None or self._final_call.done()):
            end = Operation(_END, Engine.close)
            self._final_call = self._queue(_Job(end, calling_line(), Future(), None, _OWN))

    def begin_close(self) -> None:
        """Make the thread end once the submitted calls are complete. Returns at once."""
        self._closed = True
        self._jobs.put(None)

    def close(self) -> None:
        """Complete the submitted calls, then end the thread. A second call does nothing."""
        self.begin_close()
        self._thread.join()
        failures.report()

    def _work(self) -> None:
        end_sleeps_in_time()
        engine = Engine(self._transport)
        engine.wait_policy.deadline = self._policy.deadline
        engine.wait_policy.sleep_early()
        try:
            nodes.agree_by_messages(engine)
        except BaseException as error:
            # Each call raises it.
            engine.break_off(error)
        self.recorder = engine.recorder
        while self._run_next(engine):
            pass
        if self._transport.one_process and engine.broken is None:
            # The ranks' threads end one after the other, and would wait for each other.
            engine.close()
        else:
            self._end(engine)

    def _end(self, engine: Engine) -> None:
        """Close the engine once the other ranks' threads have no calls left either."""
        engine.wait_policy.line = "the end of the communicator"
        while engine.broken is None and not self._transport.ended:
            try:
                engine.perform(_CLOSE, Engine.close)
            except MismatchError:
                # Another rank made an asynchronous call that this one did not, and has its error.
                continue
            except CollectiveError as error:
                log.warning("asynchronous calls did not end: %s", error)
            break

    def _run_next(self, engine: Engine) -> bool:
        """Run one job; False at the end. No reference to the job remains while the thread waits."""
        job = self._jobs.get()
        if job is not None:
            engine.wait_policy.deadline, engine.wait_policy.line = self._policy.deadline, job.line
            if job.tuned is not None and job.tuned[0] is not engine.costs:
                engine.use(*job.tuned)
            ends = job.operation.signature is _END
            with engine.wait_policy.no_longer_than(_RETRY_SECONDS if ends else None):
                # The final call needs no shared memory, which is not created at this time.
                if ends or self._settle(engine, job):
                    run_into(job.future, engine, job.operation, job.number, BaseException)
        goes_on = job is not None
        # The traceback of the call's error holds this frame, too.
        del job
        return goes_on

    def _settle(self, engine: Engine, job: _Job) -> bool:
        """Before the first job: synchronize and set up shared memory; False if that failed."""
        if self._settled:
            return True
        try:
            engine.perform(
                Signature("start of asynchronous calls", scope=str(job.operation.signature)),
                lambda engine: nodes.settle(engine, self._topology),
            )
        except BaseException as error:
            failures.fail(job.future, error, job.number)
            return False
        finally:
            del job
        self._settled = True
        return True


class _Job(NamedTuple):
    operation: Operation
    line: str
    future: Future[Any]
    tuned: Tuned | None
    """The cost parameters at submission, so that all ranks change them at the same job."""
    number: int
    """Of `Failures.begin`."""


def run_into(
    future: Future[Any],
    engine: Engine,
    operation: Operation,
    number: int,
    stored: type[BaseException] = Exception,
) -> None:
    """Run the operation of that number and store its result or exception in the future.

    Exceptions that aren't `stored` are raised: an interrupt is one of the thread, not of the call.
    """
    try:
        result = operation.perform(engine)
    except stored as error:
        failures.fail(future, error, number)
    else:
        future.set_result(result)
    finally:
        # The error's traceback holds this frame.
        del future


def run_at_once(engine: Engine, operation: Operation) -> Handle[Any]:
    """Run the operation now, for transports whose progress no thread may make."""
    failures.report()
    future: Future[Any] = Future()
    engine.whole(run_into, future, engine, operation, failures.begin())
    return Handle(future)


_running: weakref.WeakSet[ProgressThread] = weakref.WeakSet()


def complete_all() -> None:
    """At the program's end: complete all calls, because MPI must not end during one."""
    running = list(_running)
    # All threads start to close before any is waited for: their order in the set differs by rank.
    for progress in running:
        progress.begin_close()
    for progress in running:
        progress.close()
    failures.report(ended=True)
