"""The asynchronous form of every collective (MPI 4.1, section 6.12: nonblocking collectives)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec

from collectives.bound import reductions
from collectives.bound.all_gather import all_gather, gather
from collectives.bound.all_to_all import all_to_all
from collectives.bound.broadcast import broadcast
from collectives.bound.call_cache import CallCache, barrier
from collectives.bound.scatter import scatter
from collectives.calls import Operation
from collectives.calls.many import Many
from collectives.execution.engine import Engine
from collectives.gpu.backend import Devices
from collectives.gpu.reductions import ManyOnGpus, begins_on_gpu
from collectives.lifecycle.futures import Handle
from collectives.reductions.reduction import ReduceOp

Arguments = ParamSpec("Arguments")
Form = Callable[Concatenate["AsynchronousCollectives", Arguments], Handle[Any]]

_BOUND = frozenset({"op", "out", "axis", "root"})
"""The arguments, besides the array, of calls that are bound on GPUs."""


def _asynchronous(
    make: Callable[Concatenate[Engine, Arguments], Operation], *, bound_on_gpus: bool = False
) -> Form[Arguments]:
    """The method that starts the operation which the blocking call of the same arguments runs."""
    collective = make.__name__
    _, *parameters = signature(make).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.name in _BOUND}

    def start(
        self: AsynchronousCollectives, /, *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Handle[Any]:
        if bound_on_gpus and arguments and self._devices.serve(arguments[0]):
            started = self._start_bound(collective, defaults, arguments, named)
            if started is not None:
                return started
        return self._submit(make(self._engine, *arguments, **named))

    itself = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    start.__signature__ = Signature(  # type: ignore[attr-defined]  # inspect reads it
        [itself, *parameters], return_annotation="Handle[Any]"
    )
    start.__name__ = f"{collective}_async"
    start.__qualname__ = f"AsynchronousCollectives.{start.__name__}"
    start.__module__ = __name__
    start.__doc__ = f"""Start the call `{collective}` of these arguments.

    Wrong arguments of this rank raise ValueError or TypeError at once. All other errors of the
    call are raised by the handle's `wait`, which otherwise returns the result.
    """
    return start


class AsynchronousCollectives:
    """The calls that start a collective, and return a handle of its result at once.

    Each takes the arguments of the blocking call, whose errors, on every rank alike, are raised by
    the handle's `wait`; only wrong arguments of this rank are refused at once. Results may
    differ by rounding from those of the blocking call, which may take another path.

    Asynchronous calls run in the order in which they were started, the same on every rank, on a
    duplicate of the communicator. Blocking calls may be made in between. The deadline of a call
    begins when it runs. Neither inputs nor outputs may be changed before the call is done.
    """

    _engine: Engine
    _fused: Many
    _many_on_gpus: ManyOnGpus
    _devices: Devices
    _calls: CallCache
    _check_open: Callable[[], None]
    _submit: Callable[[Operation], Handle[Any]]

    def _start_bound(
        self,
        collective: str,
        defaults: dict[str, Any],
        arguments: Sequence[Any],
        named: dict[str, Any],
    ) -> Handle[Any] | None:
        """Start a call of an array on a GPU that is bound; None for others, and wrong arguments."""
        array, *op = arguments
        given = {"op": op[0], **named} if op else named
        if len(given) != len(op) + len(named) or not given.keys() <= defaults.keys():
            return None
        self._check_open()
        found = self._calls.find_on_gpu(collective, array, **{**defaults, **given})
        return None if found is None else self._devices.start_bound(found.run)

    all_reduce_async = _asynchronous(reductions.all_reduce, bound_on_gpus=True)
    """Start an `all_reduce`."""
    reduce_async = _asynchronous(reductions.reduce, bound_on_gpus=True)
    """Start a `reduce`."""
    reduce_scatter_async = _asynchronous(reductions.reduce_scatter, bound_on_gpus=True)
    """Start a `reduce_scatter`."""
    broadcast_async = _asynchronous(broadcast, bound_on_gpus=True)
    """Start a `broadcast`."""
    all_gather_async = _asynchronous(all_gather, bound_on_gpus=True)
    """Start an `all_gather`."""
    gather_async = _asynchronous(gather)
    """Start a `gather`."""
    scatter_async = _asynchronous(scatter)
    """Start a `scatter`. TypeError on every rank if the root's array lies on a GPU."""
    scan_async = _asynchronous(reductions.scan)
    """Start a `scan`."""
    exscan_async = _asynchronous(reductions.exscan)
    """Start an `exscan`."""
    all_to_all_async = _asynchronous(all_to_all)
    """Start an `all_to_all`."""
    barrier_async = _asynchronous(barrier)
    """Start a `barrier` between asynchronous calls: it is done once every rank has started it."""

    def all_reduce_many_async(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str = "sum",
        *,
        out: Sequence[Any] | None = None,
        bucket_bytes: int | None = None,
        what: str | None = None,
    ) -> Handle[Any]:
        """Start an `all_reduce_many`."""
        if begins_on_gpu(arrays):
            self._check_open()
            return self._many_on_gpus.submit(arrays, op, out, bucket_bytes, what)
        return self._submit(self._fused.operation(arrays, op, out, bucket_bytes, what)[0])
