"""What a communicator is beside its collectives: its ranks, how long it waits, how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

from collectives.calls import Operation
from collectives.calls.bound_many import ManyReducer
from collectives.calls.call_cache import CallCache
from collectives.calls.objects import numbers_of_all
from collectives.calls.tuning import use_saved
from collectives.consistency.arguments import check_index
from collectives.consistency.signature import Signature
from collectives.errors import CollectiveError, DeadlineExceededError, MismatchError, UnusableError
from collectives.execution.engine import Engine
from collectives.gpu.backend import Devices
from collectives.gpu.many import ManyOnGpus
from collectives.lifecycle import nodes, shutdown, topology
from collectives.lifecycle.due import Deferred
from collectives.lifecycle.futures import Handle, ProgressThread, run_at_once
from collectives.lifecycle.setup import check_backend, transport_over
from collectives.messaging.mailbox import Mailbox
from collectives.transports.base import Transport
from collectives.waiting.wait_policy import DEFAULT_DEADLINE, calling_line, check_deadline

Entered = TypeVar("Entered", bound="Group")


class Group(Deferred):
    """Ranks that make calls together."""

    def __init__(
        self,
        mpi_comm: Any,
        *,
        backend: str = "auto",
        deadline: float | None = DEFAULT_DEADLINE,
        node_of: Sequence[int] | None = None,
    ) -> None:
        """Work over a duplicate of an mpi4py communicator, or over a `Transport`. Collective.

        `backend` says how arrays on GPUs travel: "nccl" starts NCCL now, and raises
        BackendUnavailableError on every rank where any can't; "mpi" goes by way of the hosts'
        memory; "auto" finds the best that all ranks have, when the first such array comes. Arrays
        on the CPU travel over MPI. `deadline` is how many seconds a call waits for ranks that
        don't come, None for ever. `node_of` gives each rank's node, to imitate hosts; without,
        ranks that share memory share a node. Raises ValueError or TypeError on every rank where
        any gives a wrong argument, or the ranks give different maps or backends.
        """
        self._engine = engine = Engine(transport_over(mpi_comm))

        def check() -> tuple[str, list[int] | None]:
            check_backend(backend)
            engine.wait_policy.deadline = check_deadline(deadline)
            labels = None if node_of is None else topology.check_node_of(node_of, engine.size)
            return backend, labels

        try:
            labels = nodes.agree_on_start(engine, check)
        except BaseException:
            engine.close()
            raise
        self._topology = nodes.find_topology(engine, labels)
        nodes.settle(self._engine, self._topology)
        use_saved(self._engine)
        self._devices = Devices(engine, backend, self._topology.local_rank)
        engine.devices = self._devices
        try:
            self._devices.start()
        except BaseException:
            engine.close()
            raise
        self._twin = self._duplicate()
        self._progress: ProgressThread | None = None
        self._mailboxes: list[Mailbox] = []
        super().__init__()
        self._closed = False
        self._call_cache = CallCache(self._engine, self._check_open)
        self._quick = self._call_cache.known
        self._many = ManyReducer(self._engine)
        self._many_on_gpus = ManyOnGpus(self._engine)
        if not self._engine.transport.one_process:
            shutdown.keep(self)

    def _duplicate(self) -> Transport | None:
        """What asynchronous calls run on, made while all ranks are here to make it."""
        transport = self._engine.transport
        return transport.begin_duplicate()() if transport.threads else None

    @property
    def rank(self) -> int:
        """The number of this process, from 0 to size − 1."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._engine.size

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self._topology.node

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self._topology.nodes

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its node."""
        return self._topology.local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks on this rank's node."""
        return self._topology.local_size

    @property
    def backend(self) -> str:
        """How arrays on GPUs travel, as it was asked for: "auto", "mpi" or "nccl"."""
        return self._devices.backend

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def deadline(self) -> float | None:
        """How many seconds a call waits for the other ranks; None for ever. May be set."""
        return self._engine.wait_policy.deadline

    @deadline.setter
    def deadline(self, seconds: float | None) -> None:
        self._engine.wait_policy.deadline = check_deadline(seconds)
        if self._progress is not None:
            self._progress.deadline = self._engine.wait_policy.deadline

    def __enter__(self: Entered) -> Entered:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def close(self) -> None:
        """Complete asynchronous calls and give everything back. A second call does nothing.

        Collective: it waits for the other ranks to close theirs, no longer than the deadline. A
        communicator that is dropped without it is closed when the program ends.
        """
        if self._closed:
            return
        if self._engine.forked:
            raise self._engine.refusal()
        if self._engine.broken is None:
            self._run_deferred()
        self._close("close")

    def _close(self, name: str) -> None:
        """Where it raises because of the other ranks, nothing is closed yet."""
        if self._engine.broken is None and not self._engine.transport.ended:
            self._engine.perform(Signature(name), self._end)
        self._abandon_mailboxes(0)
        self._closed = True
        self._quick.clear()
        shutdown.forget(self)

    def _end(self, engine: Engine) -> None:
        self._devices.close()
        for mailbox in self._mailboxes:
            mailbox.close()
        if self._twin is not None:
            # A rank whose calls wait for others that made none would wait for their thread as well.
            asked = numbers_of_all(engine, int(self._progress is not None))
            if any(called for called, _ in asked):
                self._running().close()
            else:
                self._twin.close()
        engine.close()

    def leave(self, seconds: float) -> bool:
        """Close it because the program ends; whether there is nothing left to close.

        Where the others don't come within `seconds`, or are in a call and so get to know that this
        rank ends, it may be tried again.
        """
        if self._engine.broken is not None:
            self._devices.abandon()
            self._abandon_mailboxes(seconds)
            self._closed = True
            return True
        for mailbox in self._mailboxes:
            # Others may wait in theirs.
            mailbox.tell_end()
        try:
            with self._engine.wait_policy.no_longer_than(seconds):
                self._close("exit")
        except (DeadlineExceededError, MismatchError):
            if self._twin is not None and self.size > 1:
                # The others may wait in asynchronous calls as well.
                self._running().tell_end()
            return self._engine.broken is not None
        except CollectiveError:
            self._abandon_mailboxes(seconds)
            return True
        return True

    def _abandon_mailboxes(self, seconds: float) -> None:
        """End those that the others did not end together with this rank."""
        for mailbox in self._mailboxes:
            if self._engine.transport.ended:
                mailbox.forbid("MPI has ended")
            mailbox.abandon(seconds)
        self._mailboxes.clear()

    def _forget(self, _: object) -> None:
        """Let calls go other ways than those that were looked up."""
        self._quick.clear()
        self._many.forget()

    def _split(self: Entered, color: int | None, key: int) -> Entered | None:
        part = self._run(nodes.split(color, key))
        if part is None:
            return None
        wait_policy = self._engine.wait_policy.for_single_wait("split", self.deadline)
        wait_policy.check_alive = self._engine.wait_policy.check_alive
        node_of = nodes.gather_labels(Engine(part, wait_policy), self.node)
        return type(self)(part, backend=self.backend, deadline=self.deadline, node_of=node_of)

    def _keep(self, mailbox: Mailbox) -> None:
        """Let the mailbox end with the communicator."""
        kept = [each for each in self._mailboxes if not each.given_back]
        self._mailboxes = [*kept, mailbox]

    def _root(self, root: int) -> int:
        return check_index("root", root, self.size)

    def _check_open(self) -> None:
        if self._closed:
            raise UnusableError("the communicator is closed")
        if self._engine.broken is not None:
            raise self._engine.refusal()
        self._run_deferred()

    def _run(self, operation: Operation) -> Any:
        self._check_open()
        signature = operation.signature
        if operation.on_gpu:
            self._devices.check_call(signature)
            signature = signature.on_gpu()
        return self._engine.perform(signature, operation.run)

    def _submit(self, operation: Operation) -> Handle[Any]:
        self._check_open()
        if operation.on_gpu:
            return self._devices.submit(operation)
        if not self._engine.transport.threads:
            return run_at_once(self._engine, operation)
        return self._engine.whole(self._queue, operation, calling_line())

    def _queue(self, operation: Operation, line: str) -> Handle[Any]:
        engine = self._engine
        # From here on the other ranks may hear of it, however this ends.
        engine.begun += 1
        return self._running().submit(operation, line, (engine.costs, engine.costs_source))

    def _running(self) -> ProgressThread:
        if self._progress is None:
            assert self._twin is not None
            self._progress = ProgressThread(self._twin, self._topology, self.deadline)
        return self._progress

    def forbid(self) -> None:
        """In a forked child: MPI knows nothing of this process."""
        self._quick.clear()
        self._engine.forbid()
        for mailbox in self._mailboxes:
            mailbox.forbid(str(self._engine.broken))
