"""Ranks without data: `join` takes part in the other ranks' calls with zeros.

A rank in `join` waits in a barrier of its own text. The next call of another rank does not match
it, so that all ranks get a MismatchError before any data move. They then exchange what they were
called for, the ranks in `join` prepare zeros, and the call is made again by all. A call costs
nothing more as long as no rank has joined.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from collectives.communicator import Communicator
from collectives.errors import MismatchError
from collectives.horovod.process_sets import ranks
from collectives.reductions.reduction import ReduceOp

Result = TypeVar("Result")

_ADDED = (ReduceOp.SUM, ReduceOp.MEAN)
_IN_JOIN = "hvd.join"
_JOIN = f"barrier({_IN_JOIN})"
"""The call of a rank that has joined, in the MismatchErrors of the others."""


class Request(NamedTuple):
    """A call, for the ranks that have joined. Calls of equal requests match."""

    name: str
    tensors: tuple[tuple[tuple[int, ...], str, str], ...] = ()
    """Shape, dtype and device of each."""
    op: ReduceOp = ReduceOp.SUM
    optimizer: int = -1
    library: str = ""
    """Of the tensors: a key of `ZEROS`."""
    what: str | None = None
    """The text that the call compares."""

    def __str__(self) -> str:
        """The text by which requests are compared, and which errors show."""
        tensors = [f"{dtype}{list(shape)} on {device}" for shape, dtype, device in self.tensors]
        parts = [f"hvd.{self.name}", *tensors]
        if self.tensors:
            parts.insert(1, self.op.value)
        if self.optimizer >= 0:
            parts.append(f"optimizer {self.optimizer}")
        return ", ".join(parts if self.what is None else [*parts, self.what])

    @property
    def with_zeros(self) -> bool:
        """Whether a rank can take part with zeros."""
        return self.name in SERVED and self.op in _ADDED


class Gradients(Protocol):
    """The gradients of a distributed optimizer."""

    def add_zeros(self) -> None:
        """Take part in the reduction that the other ranks make."""

    def all_joined(self) -> None:
        """All ranks leave `join` now, wherever each of them was between two steps."""


between_steps: WeakSet[Any] = WeakSet()
"""What counts passes, reductions or calls since the last step, with a method `all_joined`."""

_noticed = threading.Event()
_numbers = itertools.count()
_gradients: WeakValueDictionary[int, Gradients] = WeakValueDictionary()


def number_gradients(comm: Communicator, gradients: Gradients) -> Request:
    """The request of a reduction of these gradients; the same on all ranks. Collective.

    Among the ranks of a process set no rank can join.
    """
    if comm is not ranks():
        return Request("gradients of a process set")
    number = next(_numbers)
    _gradients[number] = gradients
    between_steps.add(gradients)
    return Request("gradients", optimizer=number)


def with_joined(comm: Communicator, request: Request, call: Callable[[], Result]) -> Result:
    """Make a call, again if ranks have joined. Collective.

    Raises NotImplementedError on every rank that has not joined if others have and the call is not
    one that zeros can take part in; the call's own errors.
    """
    try:
        return call()
    except MismatchError as error:
        joined = _joined(comm, request, error)
        if joined is None:
            raise
        if not request.with_zeros:
            op = f" by {request.op.value}" if request.name in SERVED else ""
            raise NotImplementedError(
                f"{request.name}{op}: ranks {joined.ranks} have joined, and can't take part in it."
                " Make this call before hvd.join(), or after all ranks have joined"
            ) from None
    return call()


def notice_joined(comm: Communicator, request: Request) -> None:
    """Compare a request between the ranks, before a call in which joined ranks are not noticed."""
    with_joined(comm, request, lambda: comm.barrier(str(request)))


def join(device: int = -1) -> int:
    """Wait until every rank has joined, and return the last one that did. Collective.

    For ranks with fewer batches than others: `DistributedOptimizer`, `allreduce`,
    `grouped_allreduce`, and their asynchronous and in-place forms get zeros from the ranks that
    have joined, unless they are given a process set. "Average" still divides by the number of all
    ranks, as Horovod's. The parameters of a rank that has joined stay as they are: broadcast them
    from the returned rank.

    Every reduction of `DistributedOptimizer`, and every asynchronous call, begins with a barrier,
    in which this is noticed. Other calls cost nothing for it, unless a rank has joined: then each
    costs two exchanges more. Those that zeros can't take part in, such as `allgather`, reductions
    by Min, Max or Product, and reductions that are differentiated, raise NotImplementedError on the
    ranks that make them.

    Args:
        device: ignored.

    """
    comm, served = ranks(), 0
    while True:
        try:
            comm.barrier(_IN_JOIN)
            break
        except MismatchError as error:
            joined = _joined(comm, None, error)
            if joined is None:
                raise
        if joined.request.with_zeros:
            SERVED[joined.request.name](comm, joined.request)
        served += 1
    _noticed.clear()
    for each in list(between_steps):
        each.all_joined()
    counts = comm.all_gather(np.array([served]))
    # The last one of those that have noticed the fewest calls of others.
    return int(np.flatnonzero(counts == counts.min())[-1])


def some_have_joined() -> bool:
    """Whether some ranks are in `join`, as far as the calls so far have shown, on all ranks."""
    return _noticed.is_set()


class _Joined(NamedTuple):
    """Ranks that have joined, and the call that the others made."""

    ranks: list[int]
    request: Request


def _joined(comm: Communicator, request: Request | None, error: MismatchError) -> _Joined | None:
    """After a mismatch: the ranks that have joined, and the others' call; None if none has.

    `request` is this rank's, None in `join`. Raises `error` where those calls differ.
    """
    if _JOIN not in error.calls:
        return None
    try:
        requests = comm.all_gather_object(request)
    except MismatchError:
        # Another rank made a call of something else than this module.
        raise error from None
    joined = [rank for rank, each in enumerate(requests) if each is None]
    if not joined:
        return None
    if not all(each is None or isinstance(each, Request) for each in requests):
        raise error  # the program's own objects, after it has caught the first error
    _noticed.set()
    made: list[Request] = list({each for each in requests if each is not None})
    if len(made) != 1:
        raise error
    return _Joined(joined, made[0])


def _zeros_of(request: Request) -> list[Any]:
    """The tensors by which a rank that has joined takes part."""
    return [ZEROS[request.library](*each) for each in request.tensors]


ZEROS: dict[str, Callable[[tuple[int, ...], str, str], Any]] = {}
"""What makes a tensor of a shape, dtype and device, by the name of its library."""


def _reduce(comm: Communicator, request: Request) -> None:
    comm.all_reduce(_zeros_of(request)[0], request.op, what=request.what)


def _reduce_many(comm: Communicator, request: Request) -> None:
    comm.all_reduce_many(_zeros_of(request), request.op, what=request.what)


def _reduce_later(comm: Communicator, request: Request) -> None:
    comm.barrier(str(request))
    comm.all_reduce_async(_zeros_of(request)[0], request.op)


def _reduce_many_later(comm: Communicator, request: Request) -> None:
    comm.barrier(str(request))
    comm.all_reduce_many_async(_zeros_of(request), request.op)


def _reduce_gradients(comm: Communicator, request: Request) -> None:
    gradients = _gradients.get(request.optimizer)
    gone = "" if gradients is not None else ", whose DistributedOptimizer this rank keeps no more"
    comm.barrier(f"{request}{gone}")
    assert gradients is not None
    gradients.add_zeros()


SERVED: dict[str, Callable[[Communicator, Request], None]] = {
    "allreduce": _reduce,
    "grouped_allreduce": _reduce_many,
    "allreduce_async": _reduce_later,
    "grouped_allreduce_async": _reduce_many_later,
    "gradients": _reduce_gradients,
}
"""The calls in which a rank that has joined takes part, by the names of their requests."""
