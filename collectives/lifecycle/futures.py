"""Asynchronous calls: a thread makes their progress while the caller computes."""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic, NamedTuple, TypeVar

from collectives.calls import Operation
from collectives.consistency.flight_recorder import Entry, FlightRecorder
from collectives.consistency.signature import Signature
from collectives.errors import CollectiveError, MismatchError, in_step
from collectives.execution.cost_model import CostParameters
from collectives.execution.engine import Engine
from collectives.lifecycle import nodes
from collectives.lifecycle.topology import Topology
from collectives.transports.base import Transport
from collectives.waiting.wait_policy import calling_line, log

Result = TypeVar("Result")
Tuned = tuple[CostParameters, str]

_CLOSE = Signature("close")
_END = _CLOSE._replace(scope="exit()")
# How long the end waits for ranks that might be in an asynchronous call, before it tries again.
_TURN = 0.5


class Handle(Generic[Result]):
    """The promise of an asynchronous call's result.

    It may be dropped: the call is completed all the same, before the program exits at the latest.
    """

    def __init__(self, future: Future[Result]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Result:
        """The result; the same object at every call.

        Raises what the collective raised, and TimeoutError where `timeout` seconds go by before it
        has ended (it goes on all the same).
        """
        try:
            return self._future.result(timeout)
        except FutureTimeoutError as error:
            if self._future.done():
                raise
            # Python 3.10's future raises a TimeoutError of its own.
            raise TimeoutError(f"not done after {timeout} s") from error


class ProgressThread:
    """The thread that runs asynchronous calls, in the order of their submission on every rank.

    It has a duplicate of the communicator for itself, so that its messages and those of blocking
    calls never meet.
    """

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        deadline: float | None,
    ) -> None:
        self._transport, self._topology = transport, topology
        self.deadline = deadline
        """Of the calls that begin from now on."""
        self.recorder: FlightRecorder | None = None
        self._closed = self._settled = False
        self._told: Handle[Any] | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="collectives-progress", daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, operation: Operation, line: str, tuned: Tuned | None) -> Handle[Any]:
        """Queue the operation; return at once. RuntimeError once the thread was told to end.

        `line` is where the user asked for it, `tuned` the figures to choose by, and their name.
        """
        if self._closed:
            raise in_step(RuntimeError("asynchronous calls have ended: the program is exiting"))
        future: Future[Any] = Future()
        self._jobs.put(_Job(operation, line, future, tuned))
        return Handle(future)

    def entries(self) -> list[Entry]:
        """What the recorder holds of the calls that have ended."""
        return [] if self.recorder is None else self.recorder.entries()

    def tell_end(self) -> None:
        """Let ranks that wait for this one's asynchronous calls know that the program ends here.

        Returns at once; does nothing while an earlier one goes on. It is the threads' own last
        call, made early: where all ranks make it, nothing is left to do. Another call, given up
        after a while for that one, could be taken for a mismatch by a rank that came meanwhile.
        """
        if not self._closed and (self._told is None or self._told.done()):
            self._told = self.submit(Operation(_END, Engine.close), calling_line(), None)

    def begin_close(self) -> None:
        """Let the thread end once what was submitted is complete. Returns at once."""
        self._closed = True
        self._jobs.put(None)

    def close(self) -> None:
        """Complete what was submitted, then end the thread. A second call does nothing."""
        self.begin_close()
        self._thread.join()

    def _work(self) -> None:
        engine = Engine(self._transport)
        engine.wait_policy.deadline = self.deadline
        engine.wait_policy.sleep_early()
        nodes.agree_by_messages(engine)
        self.recorder = engine.recorder
        while self._run_next(engine):
            pass
        if self._transport.one_process and engine.broken is None:
            # The ranks' threads are told to end one after the other, and would wait for each other.
            engine.close()
        else:
            self._end(engine)

    def _end(self, engine: Engine) -> None:
        """Close, when the other ranks' threads have nothing left to do either."""
        while engine.broken is None and not self._transport.ended:
            try:
                engine.perform(_CLOSE, Engine.close)
            except MismatchError:
                # Another rank has made an asynchronous call that this one has not: it knows now.
                continue
            except CollectiveError as error:
                log.warning("asynchronous calls did not end: %s", error)
            break

    def _run_next(self, engine: Engine) -> bool:
        """Run one job; False at the end. Nothing is kept of it while the thread waits again."""
        job = self._jobs.get()
        if job is not None:
            engine.wait_policy.deadline = self.deadline
            if job.tuned is not None and job.tuned[0] is not engine.costs:
                engine.use(*job.tuned)
            ends = job.operation.signature is _END
            with engine.wait_policy.no_longer_than(_TURN if ends else None):
                # To tell the end needs no memory in common, and no communicators made at this time.
                if ends or self._settle(engine, job):
                    run_into(job.future, engine, job.operation, job.line)
        return job is not None

    def _settle(self, engine: Engine, job: _Job) -> bool:
        """At the first job: meet, then share memory; False where the job got the error of that."""
        if self._settled:
            return True
        try:
            engine.perform(
                Signature("asynchronous calls"),
                lambda engine: nodes.settle(engine, self._topology),
                job.line,
            )
        except BaseException as error:
            job.future.set_exception(error)
            return False
        self._settled = True
        return True


class _Job(NamedTuple):
    operation: Operation
    line: str
    future: Future[Any]
    tuned: Tuned | None
    """In force where it was submitted: so the ranks change at the same job."""


def run_into(
    future: Future[Any], engine: Engine, operation: Operation, line: str | None = None
) -> None:
    """Run the operation; its result or its exception goes to whoever waits for the future."""
    try:
        future.set_result(engine.perform(operation.signature, operation.run, line))
    except BaseException as error:
        future.set_exception(error)


def run_at_once(engine: Engine, operation: Operation) -> Handle[Any]:
    """The handle of an operation that has run: where no thread may make its progress."""
    future: Future[Any] = Future()
    engine.whole(run_into, future, engine, operation)
    return Handle(future)


_running: weakref.WeakSet[ProgressThread] = weakref.WeakSet()


def complete_all() -> None:
    """At the program's end: MPI must not end while a thread is inside it."""
    running = list(_running)
    # All of them begin before any is waited for: their order in the set differs by rank.
    for progress in running:
        progress.begin_close()
    for progress in running:
        progress.close()
