"""A communicator's ranks, deadline and lifetime, without its collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from collectives.asynchronous.duplicate import Duplicate
from collectives.asynchronous.messages import Messages
from collectives.bound.call_cache import CallCache
from collectives.bound.many import ManyReducer
from collectives.calls import Operation
from collectives.calls.many import Many
from collectives.consistency.signature import Signature, check_index
from collectives.diagnostics.tuning import use_saved
from collectives.errors import (
    CollectiveError,
    DeadlineExceededError,
    MismatchError,
    RankFailedError,
    UnusableError,
)
from collectives.execution.engine import Engine
from collectives.gpu.backend import Devices
from collectives.gpu.reductions import ManyOnGpus
from collectives.lifecycle import nodes, shutdown
from collectives.lifecycle.due import Deferred
from collectives.lifecycle.futures import Handle
from collectives.lifecycle.setup import transport_over
from collectives.messaging.mailbox import Mailbox
from collectives.waiting.wait_policy import DEFAULT_DEADLINE, check_deadline

Entered = TypeVar("Entered", bound="Group")


@contextmanager
def _closing_on_error(engine: Engine) -> Iterator[None]:
    try:
        yield
    except BaseException:
        engine.close()
        raise


class Group(Deferred):
    """A group of ranks that make calls together."""

    def __init__(
        self,
        mpi_comm: Any,
        *,
        backend: str = "auto",
        deadline: float | None = DEFAULT_DEADLINE,
        node_of: Sequence[int] | None = None,
    ) -> None:
        """Create a communicator over a duplicate of an mpi4py communicator. Collective.

        Args:
            mpi_comm: an mpi4py Intracomm, or a `Transport`.
            backend: how arrays on GPUs are moved. "nccl" starts NCCL now; "mpi" stages them through
                the hosts' memory; "auto" selects the best path that all ranks have, at the first
                such array. Arrays on the CPU are moved by MPI.
            deadline: how many seconds a call waits for absent ranks; None: no limit.
            node_of: each rank's node, to imitate hosts. By default, ranks that share memory share
                a node.

        Raises on every rank: BackendUnavailableError if any rank can't start NCCL, and ValueError
        or TypeError for a wrong argument of any rank, or different maps or backends. LaunchError
        for several ranks in a process that was forked after MPI had started.

        """
        self._engine = engine = Engine(transport_over(mpi_comm))
        with _closing_on_error(engine):
            labels = nodes.agree_on_start(engine, backend, deadline, node_of)
        self._topology = nodes.find_topology(engine, labels)
        nodes.settle(self._engine, self._topology)
        use_saved(self._engine)
        self._devices = engine.devices = Devices(engine, backend, self._topology.local_rank)
        with _closing_on_error(engine):
            self._devices.start()
        self._duplicate = Duplicate(engine, self._topology)
        self._messages = Messages(engine)
        self._mailboxes: list[Mailbox] = []
        super().__init__()
        self._closed = False
        self._calls = CallCache(self._engine, self._check_open, self._run)
        self._bound_calls = self._engine.bound_calls
        self._fused = Many(self._engine)
        self._many = ManyReducer(self._engine, self._fused)
        self._many_on_gpus = ManyOnGpus(self._engine, self._devices)
        if not self._engine.transport.one_process:
            shutdown.keep(self)
            self._engine.transport.before_end(self._end_with_mpi)

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
        """How arrays on GPUs are moved, as requested: "auto", "mpi" or "nccl"."""
        return self._devices.backend

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def deadline(self) -> float | None:
        """Seconds that a call waits for the other ranks; None: no limit. May be set."""
        return self._engine.wait_policy.deadline

    @deadline.setter
    def deadline(self, seconds: float | None) -> None:
        self._engine.wait_policy.deadline = check_deadline(seconds)

    def __enter__(self: Entered) -> Entered:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()

    def close(self) -> None:
        """Complete asynchronous calls and release all resources. A second call does nothing.

        Collective: it waits for the other ranks to close theirs, up to the deadline. An open
        communicator is closed when the program ends.
        """
        if self._closed:
            return
        if self._engine.forked:
            raise self._engine.refusal()
        if self._engine.broken is None:
            self._run_deferred()
            self._messages.complete()
        self._close("close")

    def _close(self, name: str) -> None:
        """Close; if the other ranks cause an exception, nothing has been closed."""
        broken = self._engine.broken is not None
        if not broken and not self._engine.transport.ended:
            self._engine.perform(Signature(name), self._end)
        self._messages.stop()
        self._abandon_mailboxes(0)
        self._closed = True
        self._forget_bound()
        # MPI may still write into the buffers of a call that has not ended.
        if not broken:
            shutdown.forget(self)

    def _end(self, engine: Engine) -> None:
        self._devices.close()
        for mailbox in self._mailboxes:
            mailbox.close()
        self._duplicate.close()
        engine.close()

    @property
    def lost_rank(self) -> bool:
        """Whether a call has failed since a rank has died."""
        return isinstance(self._engine.broken, RankFailedError)

    @property
    def unsent(self) -> bool:
        """Whether messages of this rank are still on their way."""
        return bool(self._messages.pending)

    def close_at_exit(self, seconds: float) -> bool:
        """Close at the program's end; whether nothing is left to close.

        It may be retried if the other ranks do not arrive within `seconds`, or are in a call, which
        then reports this rank's exit.
        """
        shutdown.end_by(each.refusal for each in self._mailboxes if not each.given_back)
        sent = self._messages.finish(seconds)
        if self._engine.broken is None:
            for mailbox in self._mailboxes:
                # Other ranks may wait in their mailboxes.
                mailbox.tell_end()
            if not sent:
                return False
            try:
                with self._engine.wait_policy.no_longer_than(seconds):
                    self._close("exit")
                return True
            except (DeadlineExceededError, MismatchError):
                if self._engine.broken is None:
                    self._duplicate.signal_end()
                    return False
            except CollectiveError:
                pass
        self._devices.abandon()
        self._abandon_mailboxes(seconds)
        self._closed = True
        return True

    def _abandon_mailboxes(self, seconds: float) -> None:
        """Close the mailboxes that the other ranks did not close together with this rank."""
        for mailbox in self._mailboxes:
            if self._engine.transport.ended:
                mailbox.forbid("MPI has ended")
            mailbox.abandon(seconds)
        self._mailboxes.clear()

    def _forget(self, _: object) -> None:
        """Select the path of every call anew."""
        self._forget_bound()
        self._many.forget()

    def _forget_bound(self) -> None:
        """Bind every call anew, to the same path."""
        self._bound_calls.clear()
        self._many.forget_bound()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"

    def _split(self: Entered, color: int | None, key: int) -> Entered | None:
        if color is not None:
            color = check_index("color", color, 1 << 31, also=", or None")
        key = check_index("key", key, 1 << 31, least=-(1 << 31))
        part = self._run(nodes.split(color, key))
        if part is None:
            return None
        wait_policy = self._engine.wait_policy.for_single_wait("split", self.deadline)
        wait_policy.check_alive = self._engine.wait_policy.check_alive
        node_of = nodes.gather_labels(Engine(part, wait_policy), self.node)
        return type(self)(part, backend=self.backend, deadline=self.deadline, node_of=node_of)

    def _keep(self, mailbox: Mailbox) -> None:
        """Close the mailbox with the communicator."""
        self._mailboxes = [*(each for each in self._mailboxes if not each.given_back), mailbox]

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
            operation = operation._replace(signature=signature.on_gpu())
        return operation.perform(self._engine)

    def _submit(self, operation: Operation) -> Handle[Any]:
        self._check_open()
        if operation.on_gpu:
            return self._devices.submit(operation)
        return self._duplicate.submit(operation)

    def forbid(self) -> None:
        """In a forked child: MPI knows nothing of this process."""
        self._engine.forbid()
        self._refuse(str(self._engine.broken))

    def _end_with_mpi(self) -> None:
        reason = "MPI.Finalize was called"
        self._engine.broken = self._engine.broken or UnusableError(reason)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self._forget_bound()
        for mailbox in self._mailboxes:
            mailbox.forbid(reason)
