"""The duplicate of a communicator, on which asynchronous collectives run."""

from __future__ import annotations

from typing import Any

from collectives.calls import Operation
from collectives.calls.objects import numbers_of_all
from collectives.consistency.flight_recorder import Entry
from collectives.execution.engine import Engine
from collectives.lifecycle.futures import Handle, ProgressThread, run_at_once
from collectives.lifecycle.nodes import Topology
from collectives.waiting.wait_policy import calling_line


class Duplicate:
    """One communicator's duplicate, and the thread that uses it, which the first call starts."""

    def __init__(self, engine: Engine, topology: Topology) -> None:
        """`engine` makes the blocking calls. Collective, therefore made now."""
        self._engine, self._topology = engine, topology
        transport = engine.transport
        self.transport = transport.duplicate() if transport.threads else None
        if self.transport is not None:
            # Until a thread's engine, which has its own, uses it.
            self.transport.watchdog = transport.watchdog
        self.progress: ProgressThread | None = None

    def submit(self, operation: Operation) -> Handle[Any]:
        """Queue the operation, or run it now if no thread may make its progress."""
        if self.transport is None:
            return run_at_once(self._engine, operation)
        return self._engine.whole(self._queue, operation, calling_line(), in_order=False)

    def _queue(self, operation: Operation, line: str) -> Handle[Any]:
        engine = self._engine
        if engine.broken is not None:
            # Another thread may have closed it since.
            raise engine.refusal()
        # From here on other ranks may detect the call, however it ends.
        engine.begun += 1
        return self._thread().submit(operation, line, (engine.costs, engine.costs_source))

    def _thread(self) -> ProgressThread:
        if self.progress is None:
            assert self.transport is not None
            policy = self._engine.wait_policy
            self.progress = ProgressThread(self.transport, self._topology, policy)
        return self.progress

    def entries(self) -> list[Entry]:
        """The recorded calls."""
        return [] if self.progress is None else self.progress.entries()

    def signal_end(self) -> None:
        """Signal ranks that wait in asynchronous calls that the program ends here."""
        if self.transport is not None and self._engine.size > 1:
            self._thread().signal_end()

    def close(self) -> None:
        """Complete the calls, and release all resources. Collective."""
        if self.transport is None:
            return
        # If any rank has a progress thread, the threads of all ranks must end together.
        have_thread = numbers_of_all(self._engine, int(self.progress is not None))
        if any(each for each, _ in have_thread):
            self._thread().close()
        else:
            self.transport.close()
