"""What a communicator is beside its collectives: its ranks, how long it waits, how it ends."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from typing import Any

from collectives.backends import check_backend, transport_over
from collectives.engine import Engine
from collectives.errors import CollectiveError
from collectives.handles import Handle, Progress, run_at_once
from collectives.operations import Operation, nodes, reductions
from collectives.operations.arguments import check_index
from collectives.operations.reductions import ReduceInput
from collectives.quick import AllReduce, quick_all_reduce
from collectives.quick_many import ManyReducer
from collectives.reduction import ReduceOp
from collectives.signature import Signature
from collectives.waiting import DEFAULT_DEADLINE, calling_line, check_deadline

_QUICK_KEPT = 512


class Group:
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

        `backend` is "auto" or "mpi". `deadline` is how many seconds a call waits for ranks that
        don't come, None for ever. `node_of` gives each rank's node, to imitate hosts; without,
        ranks that share memory share a node.
        """
        check_backend(backend)
        deadline = check_deadline(deadline)
        self._engine = Engine(transport_over(mpi_comm))
        self._engine.patience.deadline = deadline
        self._topology = nodes.find_topology(self._engine, node_of)
        nodes.settle(self._engine, self._topology)
        self._progress: Progress | None = None
        self._closed = False
        self._quick: dict[Any, AllReduce] = {}
        self._many = ManyReducer(self._engine)
        if not self._engine.transport.one_process:
            with _lock:
                _open[id(self)] = self

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
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def deadline(self) -> float | None:
        """How many seconds a call waits for the other ranks; None for ever. May be set."""
        return self._engine.patience.deadline

    @deadline.setter
    def deadline(self, seconds: float | None) -> None:
        self._engine.patience.deadline = check_deadline(seconds)
        if self._progress is not None:
            self._progress.deadline = self._engine.patience.deadline

    def close(self) -> None:
        """Complete asynchronous calls and give everything back. A second call does nothing.

        Collective: it waits for the other ranks to close theirs, no longer than the deadline. A
        communicator that is dropped without it is closed when the program ends.
        """
        self._close("close")

    def _close(self, name: str) -> None:
        if self._closed:
            return
        self._forget()
        self._closed = True
        if self._progress is not None:
            self._progress.close()
        if self._engine.broken is None and not self._engine.transport.ended:
            self._engine.perform(Signature(name), Engine.close)

    def _forget(self) -> None:
        self._quick.clear()
        with _lock:
            _open.pop(id(self), None)

    def _all_reduce(self, array: Any, op: ReduceOp | str, out: Any) -> Any:
        """The way that all ranks choose, for arguments of any kind; remembered if it is quick."""
        given = ReduceInput(array, op)
        output = given.output(out)
        self._check_open()
        quick = quick_all_reduce(self._engine, given)
        if quick is None:
            return self._run(reductions.all_reduce(array, op, out, None))
        source, target = given.source_for(output), output.buffer.reshape(given.shape)
        quick(target if source is None else source.reshape(given.shape), target)
        if len(self._quick) >= _QUICK_KEPT:
            self._quick.clear()
        self._quick[op, given.array.dtype, given.shape] = quick
        return output.deliver()

    def _root(self, root: int) -> int:
        return check_index("root", root, self.size)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the communicator is closed")

    def _run(self, operation: Operation) -> Any:
        self._check_open()
        return self._engine.perform(operation.signature, operation.run)

    def _submit(self, operation: Operation) -> Handle[Any]:
        self._check_open()
        if not self._engine.transport.threads:
            return run_at_once(self._engine, operation)
        with self._engine.lock:
            if self._progress is None:
                twin = self._engine.transport.begin_duplicate()
                self._progress = Progress(twin, self._topology, self.deadline)
            return self._progress.submit(operation, calling_line())

    def _after_fork(self) -> None:
        self._quick.clear()
        self._engine.lock = threading.RLock()
        self._engine.broken = RuntimeError("this process is a forked child of the rank")


_lock = threading.Lock()
_open: dict[int, Group] = {}


def _forbid_in_child() -> None:
    for group in list(_open.values()):
        group._after_fork()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forbid_in_child)


@atexit.register
def _close_all() -> None:
    """Close, in an order that all ranks share, what the program left open.

    A rank that ends while others wait for it in a call lets them know: they called that, and this
    rank the end.
    """
    for group in reversed(list(_open.values())):
        try:
            group._close("exit")
        except CollectiveError:
            # The others raise it as well, and say what they did meanwhile.
            continue
